"""Measures how numerical error alone changes the importance ratio. It samples
completions and scores the same tokens with the learner of each dtype policy. It prints a table,
recommends one, and writes OUT/doctor.png and OUT/doctor.json. Completions come from the
embedded sampler in the sampler dtype of each, from vLLM servers that it starts (--sampler vllm),
or from a running server. Do not use a training run's server: MODEL replaces its weights.

  jaxrl doctor runs/quickstart/grpo/model --data.path runs/quickstart/held_out.jsonl
  jaxrl doctor MODEL --server http://127.0.0.1:8000 --precisions fp32,bf16_master"""

import argparse
import functools
import importlib.metadata
import json
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.commands import options
from jaxrl.commands.paths import find_inputs
from jaxrl.config import toml_file
from jaxrl.config.doctor import DoctorConfig


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser("doctor", DoctorConfig, description=__doc__, usage="MODEL")
    made.add_argument("model.path", metavar="MODEL", help="directory of a Hugging Face model")
    made.add_argument("--server", metavar="URL", help="a running vLLM server (`jaxrl serve`)")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse_arguments(parser(), DoctorConfig, argv)
    config = find_inputs(config)
    if arguments.server is not None:
        sampler = config.sampler.model_dump() | {"name": "vllm", "url": [arguments.server]}
        config = toml_file.validate(DoctorConfig, config.model_dump() | {"sampler": sampler})

    from jaxrl.commands.doctor.measure import examine  # takes seconds, so after --help
    from jaxrl.commands.doctor.text import recommend, table
    from jaxrl.diagnostics import draw

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that servers stop
    measurements = examine(config, note=functools.partial(print, file=sys.stderr, flush=True))
    advice, out, (low, high) = recommend(measurements), Path(config.out), config.clip_range
    figure = draw(
        {f"{m.precision} / {m.sampler}": m.ratio for m in measurements},
        title=f"learner against sampler with equal weights: {config.model.path}",
        low=low,
        high=high,
    )
    figure.savefig(out / "doctor.png", dpi=110, format="png")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    content = {
        "config": config.model_dump(),
        "machine": {"platform": platform.platform(), **versions},
        "precisions": [
            {"precision": m.precision, "sampler": m.sampler, **m.numbers} for m in measurements
        ],
        "advice": advice,
    }
    (out / "doctor.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tokens, sequences = (
        int(max(m.numbers[key] for m in measurements)) for key in ("tokens", "sequences")
    )
    print(f"{sequences} completions, {tokens} tokens, clip range {1 - low:g} to {1 + high:g}\n")
    print(f"{table(measurements)}\n\n{advice}\n{out / 'doctor.png'}, {out / 'doctor.json'}")
    return 0
