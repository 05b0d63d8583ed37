"""Measures what kept KV caches save in episodes of several turns, as JSON lines.

python scripts/bench_turns.py --dtypes f32 bf16 --turns 8

The embedded sampler plays 64 episodes with shape S: a prompt of 256 tokens, turns of 32 tokens and
observations of 64 between them. It alternates with itself without caches, when each turn computes
its whole context.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.shapes import SHAPES
from benchmarks.timing import alternate, compared, options, write

from jaxrl.models import decoder, init
from jaxrl.sampling import EmbeddedSampler, SamplingParams, Turn, TurnCache

PROMPT, COMPLETION, OBSERVATION = 256, 32, 64  # tokens
EPISODES = 64


def play(sampler: EmbeddedSampler, seed: int, *, turns: int, caches: bool) -> None:
    rng = np.random.default_rng(seed)
    contexts = list(rng.integers(100, 4096, (EPISODES, PROMPT)))
    kept = [TurnCache() if caches else None for _ in contexts]
    for number in range(turns):
        asked = [
            Turn(context, i, 0, COMPLETION, PROMPT, cache)
            for i, (context, cache) in enumerate(zip(contexts, kept, strict=True))
        ]
        params = SamplingParams(max_tokens=COMPLETION, seed=seed * turns + number)
        for said in sampler.sample_turns(asked, params):
            heard = rng.integers(100, 4096, OBSERVATION)
            context = contexts[said.prompt_index]
            contexts[said.prompt_index] = np.concatenate([context, said.tokens, heard])


def main() -> None:
    parser = options(__doc__, repetitions=3)
    parser.add_argument("--turns", type=int, default=8, help="at most 8")
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"])
    args = parser.parse_args()
    model = decoder(SHAPES["S"])
    for dtype in args.dtypes:
        weights = init(model.specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
        precision = f"fp32,wire={dtype},sampler={dtype}"
        sampler = EmbeddedSampler(model, weights, precision=precision, max_batch=EPISODES)
        run = partial(play, sampler, turns=args.turns)
        runs = {"jaxrl": partial(run, caches=True), "whole contexts": partial(run, caches=False)}
        seconds = alternate(runs, repetitions=args.repetitions)
        row = {"shape": "S", "dtype": dtype, "episodes": EPISODES, "turns": args.turns}
        tokens = EPISODES * args.turns * COMPLETION
        write(row | compared(seconds, tokens=tokens), args.out)


if __name__ == "__main__":
    main()
