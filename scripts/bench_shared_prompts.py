"""Measures the learner's step with shared prompts against the same step without, as JSON lines.

python scripts/bench_shared_prompts.py --prompt 1024 --completion 128 --group 8 --groups 4

Both compute the same gradient; they are timed alternately. Memory is that of the compiled step.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from benchmarks.shapes import SHAPES
from benchmarks.timing import Run, alternate, processor, summary, versus, write

from jaxrl.core.batch import given_rollout
from jaxrl.core.packing import ANYWHERE, SHARED, MinibatchShape, pack_minibatch
from jaxrl.core.precision import PRESETS, Precision, jit
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo
from jaxrl.models.decoder import decoder
from jaxrl.models.spec import init

BLOCK = 128


class Built(NamedTuple):
    """A compiled step: how to run it, the tokens that pass through the layers, its memory."""

    run: Run
    passes: int
    mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--precision", choices=PRESETS, default="fp32")
    parser.add_argument("--remat", default="matmuls")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--completion", type=int, default=128, help="tokens")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=4096, help="tokens, at most")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    args = parser.parse_args()
    plain = args.prompt + args.completion
    group = args.prompt + args.group * (args.completion + 1)
    shared = max(1, args.microbatch // group) * group
    shapes = {
        "plain": MinibatchShape(row_length=plain, rows_per_microbatch=args.microbatch // plain),
        "shared": MinibatchShape(
            row_length=-(-shared // BLOCK) * BLOCK, rows_per_microbatch=1, align=SHARED
        ),
    }
    assert shapes["plain"].align == ANYWHERE
    steps = {name: build(args, shape) for name, shape in shapes.items()}
    runs = {name: one.run for name, one in steps.items()}
    seconds = alternate(runs, repetitions=args.repetitions)
    keys = ("shape", "precision", "remat", "prompt", "completion", "group", "groups")
    row = {key: getattr(args, key) for key in keys} | {"processor": processor()}
    for name, one in steps.items():
        row |= {f"{name} token passes": one.passes, f"{name} step MiB": one.mib}
        row |= {f"{name} steps/s": summary([1 / s for s in seconds[name]])}
    rates = {name: [1 / s for s in values] for name, values in seconds.items()}
    row |= {"fewer token passes": steps["plain"].passes / steps["shared"].passes}
    row |= {"times as fast": versus(rates["shared"], rates["plain"])}
    write(row, args.out)


def build(args: argparse.Namespace, shape: MinibatchShape) -> Built:
    """Compiles a step of GRPO with AdamW on random weights and random tokens."""
    precision: Precision = PRESETS[args.precision]
    config, rng = SHAPES[args.shape], np.random.default_rng(0)
    prompts = rng.integers(100, config.vocab_size, (args.groups, args.prompt))
    rollouts = [
        given_rollout(prompt, rng.integers(100, config.vocab_size, args.completion))._replace(
            logprobs=rng.normal(-np.log(config.vocab_size), 0.1, args.completion)
        )
        for prompt in prompts
        for _ in range(args.group)
    ]
    minibatch = pack_minibatch(rollouts, list(rng.normal(size=len(rollouts))), shape=shape)
    model = decoder(config, remat=args.remat)
    learner = make_learner(
        model,
        grpo().objective,
        optimizer=optax.adamw(1e-6),
        precision=precision,
        rows_per_microbatch=shape.rows_per_microbatch,
    )
    state = jit(learner.init)(init(model.specs, jax.random.key(0), dtype=precision.params))
    step = jit(learner.step, donate_argnums=0).lower(state, minibatch).compile()
    memory = step.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes

    def run(_: int) -> None:
        nonlocal state
        state, metrics = step(state, minibatch)
        jax.block_until_ready((state, metrics))

    return Built(run, minibatch.batch.tokens.size, held / 2**20)


if __name__ == "__main__":
    main()
