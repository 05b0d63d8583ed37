"""The embedded sampler as a benchmark."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run

from jaxrl.commands.plan.roofline import active_weights
from jaxrl.models import DecoderConfig, decoder, init
from jaxrl.sampling import EmbeddedSampler, SamplingParams, Turn

GROUP = 8  # completions per prompt


def windowed(shape: str, *, window: int | None, every: int) -> DecoderConfig:
    """Returns a model with a window, in tokens, on `every` n-th layer; None leaves it out."""
    config = SHAPES[shape]
    windows = tuple(None if i % every else window for i in range(config.num_layers))
    return dataclasses.replace(config, windows=windows)


def embedded(
    config: DecoderConfig,
    *,
    dtype: str,
    limits: np.ndarray,
    in_flight: int,
    prompt: int = PROMPT,
    sums: str = "any",
    together: bool = True,
) -> Run:
    """Builds a run of the embedded sampler with random weights, on groups of GROUP completions with
    i[N] `limits` and no stop sequence.

    At most `in_flight` completions are decoded at once. Unless they are requested `together`, each
    `in_flight` completions are a request, and the next one waits for its end.
    """
    model = decoder(config)
    weights = init(model.specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
    precision = f"fp32,wire={dtype},sampler={dtype},sums={sums}"
    sampler = EmbeddedSampler(model, weights, precision=precision, max_batch=in_flight)
    turns = asked(config, limits, prompt=prompt)
    size = len(turns) if together else in_flight

    def run(seed: int) -> None:
        params = SamplingParams(max_tokens=ANSWER, seed=seed)
        tokens = 0
        for i in range(0, len(turns), size):
            tokens += sum(len(c.tokens) for c in sampler.sample_turns(turns[i : i + size], params))
        assert tokens == sum(limits)

    return run


def asked(config: DecoderConfig, limits: np.ndarray, *, prompt: int = PROMPT) -> list[Turn]:
    """Builds groups of GROUP completions with i[N] limits and random prompts."""
    prompts = random_prompts(config, sequences=len(limits), length=prompt)
    return [Turn(prompts[i // GROUP], i // GROUP, i % GROUP, int(n)) for i, n in enumerate(limits)]


def equal(sequences: int) -> np.ndarray:
    """Returns the same length for all completions."""
    return np.full(sequences, ANSWER)


def lognormal(sequences: int) -> np.ndarray:
    """Draws lengths typical of reinforcement learning: lognormal with median ANSWER / 4, and a
    tenth of them truncated at ANSWER."""
    rng = np.random.default_rng(0)
    found = np.clip(rng.lognormal(np.log(ANSWER / 4), 0.8, sequences), 1, ANSWER).astype(int)
    found[rng.permutation(sequences)[: sequences // 10]] = ANSWER
    return found


LENGTHS = {"equal": equal, "lognormal": lognormal}


def random_prompts(config: DecoderConfig, *, sequences: int, length: int = PROMPT) -> np.ndarray:
    """Draws a prompt for each group of completions: i64[sequences / GROUP, length]."""
    rng = np.random.default_rng(0)
    return rng.integers(100, config.vocab_size, (sequences // GROUP, length))


def flops_per_token(config: DecoderConfig, *, prompt: int) -> float:
    """Counts the FLOPs of a decoded token in the middle of a completion."""
    seen = prompt + ANSWER / 2
    keys = sum(min(seen, kind.window or seen) for kind in config.kinds)
    cached = 2 * config.num_heads * config.head_dim * keys
    return 2 * (active_weights(config, decoder(config).specs) + cached)
