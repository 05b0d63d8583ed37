"""Measures how numerical error alone changes the importance ratio. It samples
completions and scores the same tokens with the learner of each dtype policy. It prints a table,
recommends one, and writes OUT/doctor.png and OUT/doctor.json. Completions come from the
embedded sampler in the sampler dtype of each, from vLLM servers that it starts (--sampler vllm),
or from a running server. Do not use a training run's server: MODEL replaces its weights.
--certify judges one precision and writes OUT/certificate.json, which `jaxrl train` holds a run with
that directory to. The exit status is 3 if it does not pass. --attribute divides beta of one
precision among the modules of the model. --budget finds the cheapest precision whose beta stays
under a bound; with --topology its costs are those of chips that are not here, see `jaxrl plan`.

  jaxrl doctor runs/quickstart/grpo/model --data.path runs/quickstart/held_out.jsonl
  jaxrl doctor MODEL --server http://127.0.0.1:8000 --precisions fp32,bf16_master
  jaxrl doctor MODEL --certify --precisions bf16_master --out runs/mine
  jaxrl doctor MODEL --budget 0.01 --topology v5p:1x1x1"""

import argparse
import functools
import importlib.metadata
import json
import math
import platform
import signal
import sys
from collections.abc import Callable, Sequence
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
    made.add_argument(
        "--certify", action="store_true", help="judge one precision; write OUT/certificate.json"
    )
    made.add_argument(
        "--attribute", action="store_true", help="divide beta of one precision among the modules"
    )
    made.add_argument(
        "--budget",
        metavar="NATS",
        type=float,
        help="find the cheapest precision whose beta has at most this standard deviation",
    )
    made.add_argument(
        "--topology", help="with --budget: chips to compile steps for, such as v5p:1x1x1 or h100:1"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse_arguments(parser(), DoctorConfig, argv)
    config = find_inputs(config)
    if arguments.server is not None:
        sampler = config.sampler.model_dump() | {"name": "vllm", "url": [arguments.server]}
        config = toml_file.validate(DoctorConfig, config.model_dump() | {"sampler": sampler})

    if sum(map(bool, (arguments.certify, arguments.attribute, arguments.budget))) > 1:
        raise toml_file.ConfigError("--certify, --attribute and --budget: give one of them")
    if arguments.budget is not None and not 0 < arguments.budget < math.inf:
        raise toml_file.ConfigError(
            f"--budget {arguments.budget:g}: give nats above 0, such as .01"
        )
    if arguments.topology is not None and arguments.budget is None:
        raise toml_file.ConfigError("--topology: it is for --budget, whose costs it says")
    note = functools.partial(print, file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that servers stop
    if arguments.certify:
        from jaxrl.commands.doctor.certify import certify

        return certify(config, note=note)
    if arguments.attribute:
        from jaxrl.commands.doctor.attribute import show_parts

        return show_parts(config, note=note)
    if arguments.budget:
        from jaxrl.commands.doctor.budget import spend

        return spend(config, bound=arguments.budget, topology=arguments.topology, note=note)
    return _compare(config, note=note)


def _compare(config: DoctorConfig, *, note: Callable[[str], None]) -> int:
    from jaxrl.commands.doctor.measure import examine  # takes seconds, so after --help
    from jaxrl.commands.doctor.text import recommend, table
    from jaxrl.diagnostics import draw

    measurements = examine(config, note=note)
    advice, out = recommend(measurements), Path(config.out)
    figure = draw(
        {f"{m.precision} / {m.sampler}": m.ratio for m in measurements},
        title=f"learner against sampler with equal weights: {config.model.path}",
        clip=config.clip,
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
    print(f"{sequences} completions, {tokens} tokens, clip range {config.clip}\n")
    print(f"{table(measurements)}\n\n{advice}\n{out / 'doctor.png'}, {out / 'doctor.json'}")
    return 0
