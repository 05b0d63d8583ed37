"""Times the embedded sampler, and a plain decoding loop beside it."""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.decoder import decoder
from jaxrl.models.families import DecoderConfig, Rope
from jaxrl.models.spec import init
from jaxrl.precision import parse
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded import EmbeddedSampler

PROMPT, ANSWER, GROUP = 64, 192, 8  # tokens, tokens, answers per prompt

_COMMON = {
    "model_type": "qwen3",
    "num_heads": 8,
    "num_kv_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope": Rope(theta=1e6),
    "qkv_bias": False,
    "qk_norm": True,
    "tied": True,
    "max_positions": 1024,
}
SHAPES = {
    "S": DecoderConfig(
        **_COMMON,
        vocab_size=4096,
        hidden_size=256,
        num_layers=6,
        head_dim=32,
        intermediate_size=768,
    ),
    "M": DecoderConfig(
        **_COMMON,
        vocab_size=8192,
        hidden_size=512,
        num_layers=12,
        head_dim=64,
        intermediate_size=1536,
    ),
}

Run = Callable[[int], object]  # draws all answers with a seed and waits for them


def embedded(shape: str, *, dtype: str, sequences: int) -> Run:
    """The embedded sampler with random weights: groups of GROUP answers that never stop."""
    config = SHAPES[shape]
    model = decoder(config)
    params = init(model.specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
    policy = parse(f"fp32,wire={dtype},sampler={dtype}")
    sampler = EmbeddedSampler(model, params, precision=policy, max_batch=sequences)
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, config.vocab_size, (sequences // GROUP, PROMPT))

    def run(seed: int) -> None:
        answers = SamplingParams(max_tokens=ANSWER, seed=seed)
        tokens = sum(len(c.tokens) for c in sampler.sample(prompts, answers, group_size=GROUP))
        assert tokens == sequences * ANSWER

    return run


def plain_loop(directory: Path, shape: str, *, dtype: str) -> Run:
    """A hand-written decoding loop of the same shapes, for 64 sequences: `jax_decode.py` in
    `directory`, which reads its settings from the command line and its weights from models/."""
    for name in ("jax_decode", "jax_base", "jax_step", "common"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(directory))
    argv, sys.argv = sys.argv, ["", "--model", shape, "--prec", {"f32": "fp32"}.get(dtype, dtype)]
    try:
        base = importlib.import_module("jax_step")
        sys.modules["jax_base"] = base
        loop = importlib.import_module("jax_decode")
    finally:
        sys.argv = argv
        sys.path.remove(str(directory))
    weights = jax.tree.map(jnp.asarray, base.load())
    prompts = jnp.asarray(base.fixed_batch(shape)["prompt_ids"])
    generate = jax.jit(loop.generate)

    def run(seed: int) -> None:
        jax.block_until_ready(generate(weights, prompts, jax.random.key(seed, impl=loop.RI)))

    return run


def alternate(runs: dict[str, Run], *, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every repetition, one run after the other so that a disturbance hits them alike;
    the first call of each, which compiles, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(repetitions + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(seed)
            if seed:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def flops_per_token(shape: str) -> float:
    """Matrix products and attention of one decoded token, at the middle of an answer."""
    c = SHAPES[shape]
    attention = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim
    body = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    seen = PROMPT + ANSWER / 2
    cached = 2 * c.num_layers * c.num_heads * c.head_dim * seen
    return 2 * (body + c.vocab_size * c.hidden_size + cached)


def matmul_peak(dtype: str) -> float:
    """FLOP/s of a large matrix product with operands in `dtype` and an f32 result."""
    size = 2048
    x = jnp.ones((size, size), parse(f"fp32,sampler={dtype}").sampler)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    seconds = alternate({"": lambda _: product(x).block_until_ready()}, repetitions=8)
    return 2 * size**3 / min(seconds[""])
