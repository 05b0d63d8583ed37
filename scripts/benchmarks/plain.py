"""Hand-written baselines from a directory. `torch_step.py`, `jax_decode.py` and its `jax_step.py`
read their settings from the command line."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from benchmarks.timing import Run

FLAGS = {"f32": "fp32", "bf16": "bf16"}


def loop(directory: Path, shape: str, *, dtype: str) -> Run:
    """Builds a decoding loop for 64 sequences."""
    with _started(directory, shape, dtype):
        base = importlib.import_module("jax_step")
        sys.modules["jax_base"] = base  # jax_decode imports jax_step by this name
        decode = importlib.import_module("jax_decode")
    weights = jax.tree.map(jnp.asarray, base.load())
    prompts = jnp.asarray(base.fixed_batch(shape)["prompt_ids"])
    generate = jax.jit(decode.generate)

    def run(seed: int) -> None:
        jax.block_until_ready(generate(weights, prompts, jax.random.key(seed, impl=decode.RI)))

    return run


def torch_step(directory: Path, shape: str, *, dtype: str, rows: int) -> Run:
    """Builds a GRPO step in torch on 64 sequences, `rows` per microbatch; compiles at first."""
    with _started(directory, shape, dtype, "--micro", str(rows), "--compile"):
        common: Any = importlib.import_module("common")
        # The program would time itself and print the result.
        common.timed = lambda step, n: (0.0, [{"wall": 1.0}])
        common.record = lambda *args, **kwargs: None
        program = importlib.import_module("torch_step")
    return lambda _: program.step()


@contextlib.contextmanager
def _started(directory: Path, shape: str, dtype: str, *flags: str) -> Iterator[None]:
    """Allows a fresh import of the directory's programs, as if started with these settings."""
    for name in ("jax_decode", "jax_base", "jax_step", "torch_step", "common"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(directory))
    argv, sys.argv = sys.argv, ["", "--model", shape, "--prec", FLAGS[dtype], *flags]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path.remove(str(directory))
