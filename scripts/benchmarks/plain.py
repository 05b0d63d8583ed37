"""Hand-written baselines: `jax_step.py` and `jax_decode.py` in a directory, with settings from the
command line and weights from models/."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
from benchmarks.timing import Run

FLAGS = {"f32": "fp32", "bf16": "bf16"}


def step(directory: Path, shape: str, *, dtype: str, rows: int) -> Run:
    """Builds a GRPO step on 64 sequences, `rows` per microbatch."""
    (base,) = _load(directory, "jax_step", shape, dtype, "--attn", "cvjp", "--micro", str(rows))
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
    base, decode = _load(directory, "jax_step jax_decode", shape, dtype)
    weights = jax.tree.map(jnp.asarray, base.load())
    prompts = jnp.asarray(base.fixed_batch(shape)["prompt_ids"])
    generate = jax.jit(decode.generate)

    def run(seed: int) -> None:
        jax.block_until_ready(generate(weights, prompts, jax.random.key(seed, impl=decode.RI)))

    return run


def _load(directory: Path, names: str, shape: str, dtype: str, *flags: str) -> list[ModuleType]:
    for name in ("jax_decode", "jax_base", "jax_step", "common"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(directory))
    argv, sys.argv = sys.argv, ["", "--model", shape, "--prec", FLAGS[dtype], *flags]
    try:
        modules = []
        for name in names.split():
            modules.append(importlib.import_module(name))
            sys.modules["jax_base"] = modules[0]  # jax_decode imports jax_step by this name
        return modules
    finally:
        sys.argv = argv
        sys.path.remove(str(directory))
