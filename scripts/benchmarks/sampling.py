"""The embedded sampler as a benchmark."""

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run

from jaxrl.core.precision import parse
from jaxrl.models.decoder import decoder
from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import init
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler

GROUP = 8  # completions per prompt


def embedded(shape: str, *, dtype: str, sequences: int, sums: str = "any") -> Run:
    """Builds a run of the embedded sampler: random weights, groups of GROUP endless completions."""
    config = SHAPES[shape]
    model = decoder(config)
    weights = init(model.specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
    policy = parse(f"fp32,wire={dtype},sampler={dtype},sums={sums}")
    sampler = EmbeddedSampler(model, weights, precision=policy, max_batch=sequences)
    prompts = random_prompts(config, sequences=sequences)

    def run(seed: int) -> None:
        params = SamplingParams(max_tokens=ANSWER, seed=seed)
        tokens = sum(len(c.tokens) for c in sampler.sample(prompts, params, group_size=GROUP))
        assert tokens == sequences * ANSWER

    return run


def random_prompts(config: DecoderConfig, *, sequences: int) -> np.ndarray:
    """Draws a prompt for each group of completions: i64[sequences / GROUP, PROMPT]."""
    rng = np.random.default_rng(0)
    return rng.integers(100, config.vocab_size, (sequences // GROUP, PROMPT))


def flops_per_token(shape: str) -> float:
    """Counts the FLOPs of a decoded token in the middle of a completion."""
    c = SHAPES[shape]
    attention = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim
    body = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    seen = PROMPT + ANSWER / 2
    cached = 2 * c.num_layers * c.num_heads * c.head_dim * seen
    return 2 * (body + c.vocab_size * c.hidden_size + cached)
