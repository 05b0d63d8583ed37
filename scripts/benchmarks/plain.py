"""Hand-written baselines: `jax_step.py`, `jax_decode.py` and `torch_step.py` in a directory, with
settings from the command line and JAX weights from models/."""

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


def step(directory: Path, shape: str, *, dtype: str, rows: int) -> Run:
    """Builds a GRPO step on 64 sequences, `rows` per microbatch."""
    with _started(directory, shape, dtype, "--attn", "cvjp", "--micro", str(rows)):
        base = importlib.import_module("jax_step")
    fixed, old = base.fixed_batch(shape), base.old_logps(shape)
    tokens = jnp.concatenate([fixed["prompt_ids"], fixed["completion_ids"]], axis=1)
    weights = jax.tree.map(jnp.asarray, base.load())
    state = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)), jnp.float32(0))
    compiled = jax.jit(base.step, donate_argnums=(0, 1, 2))

    def run(_: int) -> None:
        nonlocal state
        *state, _, _ = jax.block_until_ready(compiled(*state, tokens, fixed["adv"], old))

    return run


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
    """Builds the step in torch, which its first call compiles."""
    with _started(directory, shape, dtype, "--micro", str(rows), "--compile"):
        common: Any = importlib.import_module("common")
        # The program times itself and prints the result; here it is timed with the others.
        common.timed = lambda step, n: (0.0, [{"wall": 1.0}])
        common.record = lambda *args, **kwargs: None
        program = importlib.import_module("torch_step")
    return lambda _: program.step()


@contextlib.contextmanager
def _started(directory: Path, shape: str, dtype: str, *flags: str) -> Iterator[None]:
    """Lets programs of the directory be imported, anew, as if started with these settings."""
    for name in ("jax_decode", "jax_base", "jax_step", "torch_step", "common"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(directory))
    argv, sys.argv = sys.argv, ["", "--model", shape, "--prec", FLAGS[dtype], *flags]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path.remove(str(directory))
