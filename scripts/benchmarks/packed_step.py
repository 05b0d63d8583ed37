"""The learner's step on groups of completions, with and without shared prompts."""

from typing import NamedTuple

import jax
import numpy as np
import optax
from benchmarks.timing import Run

from jaxrl.core.batch import given_rollout
from jaxrl.core.packing import SHARED, MinibatchShape, pack_minibatch
from jaxrl.core.precision import Precision, jit
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo
from jaxrl.models.decoder import decoder
from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import init

BLOCK = 128


class Groups(NamedTuple):
    """Groups of completions: their number, completions of a group, tokens of prompts and
    completions."""

    count: int
    size: int
    prompt: int
    completion: int


class Built(NamedTuple):
    """A compiled step: a run, the tokens that pass through the layers, memory of the program."""

    run: Run
    passes: int
    mib: float


def build(
    config: DecoderConfig,
    *,
    precision: Precision,
    remat: str,
    work: Groups,
    microbatch: int,
    shared: bool,
) -> Built:
    """Compiles a step of GRPO with AdamW on random weights and tokens.

    Args:
      config: of the model.
      precision: the dtype policy.
      remat: see `decoder`.
      work: the completions.
      microbatch: most tokens of a microbatch.
      shared: whether the completions of a group share their prompt, in one long row.
    """
    rng = np.random.default_rng(0)
    vocabulary = config.vocab_size
    prompts = rng.integers(100, vocabulary, (work.count, work.prompt)).tolist()
    rollouts = [
        given_rollout(prompt, rng.integers(100, vocabulary, work.completion).tolist())._replace(
            logprobs=rng.normal(-np.log(vocabulary), 0.1, work.completion)
        )
        for prompt in prompts
        for _ in range(work.size)
    ]
    shape = _row_shape(work, microbatch=microbatch, shared=shared)
    minibatch = pack_minibatch(rollouts, list(rng.normal(size=len(rollouts))), shape=shape)
    model = decoder(config, remat=remat)
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


def _row_shape(work: Groups, *, microbatch: int, shared: bool) -> MinibatchShape:
    alone = work.prompt + work.completion
    if not shared:
        return MinibatchShape(row_length=alone, rows_per_microbatch=max(1, microbatch // alone))
    group = work.prompt + work.size * (work.completion + 1)
    length = max(1, microbatch // group) * group
    return MinibatchShape(
        row_length=-(-length // BLOCK) * BLOCK, rows_per_microbatch=1, align=SHARED
    )
