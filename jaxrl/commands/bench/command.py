"""Measures the accelerator that is there: the learner's tokens/s and MFU, the sampler's
tokens/s, the time of a publish, and beta of each dtype policy at equal weights. It needs no
checkpoint: weights are random. By default the model has Qwen3-0.6B's shape, or on a CPU a small
one. It writes OUT with versions and machine; docs/results/speed.md lists others' numbers beside it.

  jaxrl bench
  jaxrl bench MODEL --precisions bf16_master,fp16_master --only learner"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands import options
from jaxrl.config.doctor import joined_policies
from jaxrl.core import Precision

_PARTS = ("learner", "decode", "publish", "beta")
_PACKAGES = ("jaxrl", "jax", "jaxlib", "flax", "optax", "numpy")
# Of each part, the number that the table shows.
_SHOWN = {
    "learner": ("MFU", "{:.1%} MFU"),
    "decode": ("tokens/s", "{:,.0f} tokens/s"),
    "publish": ("seconds", "{:.3f} s"),
    "beta": ("std", "std {:.1e}"),
}


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("bench", __doc__)
    made.add_argument("model", nargs="?", metavar="MODEL", help="directory of a config.json")
    made.add_argument("--precisions", default="bf16_master,fp16_master,fp32", help="dtype policies")
    made.add_argument("--only", default=",".join(_PARTS), help=f"parts of {', '.join(_PARTS)}")
    made.add_argument(
        "--out", type=options.output, default=Path("bench.json"), help="(default: bench.json)"
    )
    for name, text in {
        "row": "tokens of a row of the learner's batch",
        "sequence": "tokens of a sequence in it",
        "prompt": "tokens of its prompt",
        "microbatches": "rows of a step",
        "sequences": "completions that are sampled at once, a multiple of 8",
        "completion": "tokens of one of them",
        "repetitions": "timed runs, of which the fastest counts",
    }.items():
        made.add_argument(f"--{name}", type=int, metavar="N", help=text)
    made.add_argument("--remat", help="as train.remat")
    made.add_argument("--attention", help="a kernel, as train.attention")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments = parser().parse_args(argv)
    texts = joined_policies(arguments.precisions.split(","))
    parts = arguments.only.split(",")
    if unknown := sorted({*parts} - {*_PARTS}):
        raise ValueError(f"--only {unknown[0]}: expected some of {', '.join(_PARTS)}")

    import jax  # these take seconds, so after --help

    from jaxrl import models
    from jaxrl.commands.bench import sizes, work
    from jaxrl.huggingface import Checkpoint

    device = jax.devices()[0]
    config = sizes.SMALL if device.platform == "cpu" else sizes.QWEN3
    if arguments.model:
        config = Checkpoint(arguments.model).config
    size = sizes.CPU if device.platform == "cpu" else sizes.ACCELERATOR
    names = [field.name for field in dataclasses.fields(size)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    size = _checked(dataclasses.replace(size, **given))
    bench = work.build(config, size)
    found: dict[str, Any] = {
        "device": device.device_kind,
        "devices": f"1 of {jax.device_count()}",
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "model": arguments.model or f"{config.model_type}, {config.num_layers} layers",
        "parameters": models.parameter_count(bench.model.specs),
        "work": dataclasses.asdict(size),
        "precisions": {},
    }
    for text in texts:
        measured = found["precisions"].setdefault(text, {})
        for part in parts:
            print(f"{text}: {part}", file=sys.stderr, flush=True)
            try:
                measured[part] = getattr(work, part)(bench, Precision.parse(text))
            except (ValueError, RuntimeError) as error:  # such as too little memory
                measured[part] = {"error": " ".join(str(error).split())[:300]}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{_table(found, parts)}\n{arguments.out}")
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # jaxrl in a checkout that is not installed
        return None


def _checked(work: Any) -> Any:
    if not 0 < work.prompt < work.sequence <= work.row:
        raise ValueError(
            f"--prompt {work.prompt}, --sequence {work.sequence}, --row {work.row}: a prompt must "
            "be shorter than its sequence, and a sequence must fit into a row"
        )
    if work.sequences < 8 or work.sequences % 8:
        raise ValueError(f"--sequences {work.sequences}: expected a multiple of 8")
    if (longest := work.prompt // 2 + work.completion) > work.row:
        raise ValueError(
            f"--completion {work.completion}: with half a prompt it has {longest} tokens, more "
            f"than --row {work.row}"
        )
    return work


def _table(found: dict[str, Any], parts: Sequence[str]) -> str:
    """Formats one line for each precision."""
    lines = [f"{found['device']}, {found['model']}, {found['parameters']:,} parameters"]
    for text, measured in found["precisions"].items():
        cells = []
        for part in parts:
            key, shape = _SHOWN[part]
            numbers = measured[part]
            cells.append(f"{part} {shape.format(numbers[key]) if key in numbers else 'failed'}")
        lines.append(f"{text}: {'; '.join(cells)}")
    return "\n".join(lines)
