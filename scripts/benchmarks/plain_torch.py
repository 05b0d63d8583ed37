"""A hand-written baseline in torch: `torch_step.py` in a directory, compiled by torch."""

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.timing import Run

FLAGS = {"f32": "fp32", "bf16": "bf16"}


def step(directory: Path, shape: str, *, dtype: str, rows: int) -> Run:
    """Builds a GRPO step on 64 sequences, `rows` per microbatch; its first call compiles."""
    sys.path.insert(0, str(directory))
    for name in ("torch_step", "common"):
        sys.modules.pop(name, None)
    common: Any = importlib.import_module("common")
    # The program times itself and prints the result; here it is timed with the others.
    common.timed = lambda step, n: (0.0, [{"wall": 1.0}])
    common.record = lambda *args, **kwargs: None
    flags = ["--model", shape, "--prec", FLAGS[dtype], "--micro", str(rows), "--compile"]
    argv, sys.argv = sys.argv, ["", *flags]
    try:
        torch_step = importlib.import_module("torch_step")
    finally:
        sys.argv = argv
        sys.path.remove(str(directory))
    return lambda _: torch_step.step()
