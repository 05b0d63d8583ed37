"""The learner's step as a benchmark, with its memory and FLOPs: on groups of completions, with and
without shared prompts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run

from jaxrl.commands.plan.roofline import forward_flops
from jaxrl.core import (
    SHARED,
    Minibatch,
    MinibatchShape,
    Precision,
    given_rollout,
    jit,
    pack_minibatch,
)
from jaxrl.learner import make_learner
from jaxrl.losses import grpo, with_terms
from jaxrl.models import DecoderConfig, decoder, init

SEQUENCES, LENGTH = 64, PROMPT + ANSWER
LEARNING_RATE, CLIP_NORM = 1e-6, 1.0
_BLOCK = 128  # tokens; rows with shared prompts have a multiple


class Built(NamedTuple):
    """A compiled step."""

    run: Run  # takes one step
    passes: int  # tokens that pass through the layers
    mib: float  # memory of the compiled program: arguments and temporaries


class Groups(NamedTuple):
    """Groups of completions."""

    count: int  # of groups
    size: int  # completions of a group
    prompt: int  # tokens
    completion: int  # tokens


SINGLE = Groups(SEQUENCES, 1, PROMPT, ANSWER)  # full rows of one sequence each


def learner_step(
    config: DecoderConfig,
    *,
    precision: Precision,
    remat: str,
    work: Groups,
    microbatch: int,
    shared: bool = False,
    elide: bool = False,
    kl: float = 0.0,
) -> Built:
    """Compiles a step of GRPO with AdamW on random weights and tokens, with at most `microbatch`
    tokens in a microbatch. If `shared`, a group shares its prompt, in one long row. If `elide`, XLA
    may leave out roundings. With a coefficient `kl`, a reference scores the tokens before the
    step."""
    model = decoder(config, remat=remat)
    shape = _row_shape(work, microbatch=microbatch, shared=shared)
    minibatch = _minibatch(work, shape, vocabulary=config.vocab_size)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), optax.adamw(LEARNING_RATE, weight_decay=0.0)
    )
    loss = with_terms(grpo(), kl=kl).objective
    learner = make_learner(model, loss, optimizer=optimizer, precision=precision)
    weights = init(model.specs, jax.random.key(0), dtype=precision.params)
    state = jit(learner.init)(weights)
    score, given = jit(learner.score), minibatch
    if kl:
        weights = jax.tree.map(jnp.copy, weights)  # the step donates the policy's
        minibatch = dataclasses.replace(given, reference=score(weights, given))
    lowered = jit(learner.step, donate_argnums=0).lower(state, minibatch)
    step = lowered.compile({"xla_allow_excess_precision": elide})
    memory = step.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes

    def run(_: int) -> None:
        nonlocal state
        before = {"reference": score(weights, given)} if kl else {}
        state, metrics = step(state, dataclasses.replace(given, **before))
        jax.block_until_ready((state, metrics))

    return Built(run, minibatch.batch.tokens.size, held / 2**20)


def forward(config: DecoderConfig, *, precision: Precision, microbatch: int) -> Run:
    """Compiles the learner's scores of SINGLE's tokens under random weights."""
    model = decoder(config)
    minibatch = _minibatch(
        SINGLE,
        _row_shape(SINGLE, microbatch=microbatch, shared=False),
        vocabulary=config.vocab_size,
    )
    learner = make_learner(
        model, grpo().objective, optimizer=optax.sgd(LEARNING_RATE), precision=precision
    )
    weights = init(model.specs, jax.random.key(0), dtype=precision.params)
    score = jit(learner.score, sums=precision.sums)
    return lambda _: jax.block_until_ready(score(weights, minibatch))


def _minibatch(work: Groups, shape: MinibatchShape, *, vocabulary: int) -> Minibatch:
    """Draws completions with the log-probs of a uniform policy plus noise, close to the learner's
    random weights."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, vocabulary, (work.count, work.prompt)).tolist()
    rollouts = [
        given_rollout(prompt, rng.integers(100, vocabulary, work.completion).tolist())._replace(
            logprobs=rng.normal(-np.log(vocabulary), 0.1, work.completion)
        )
        for prompt in prompts
        for _ in range(work.size)
    ]
    return pack_minibatch(rollouts, list(rng.normal(size=len(rollouts))), shape=shape)


def _row_shape(work: Groups, *, microbatch: int, shared: bool) -> MinibatchShape:
    alone = work.prompt + work.completion
    if not shared:
        return MinibatchShape(row_length=alone, rows_per_microbatch=max(1, microbatch // alone))
    group = work.prompt + work.size * (work.completion + 1)
    length = max(1, microbatch // group) * group
    return MinibatchShape(
        row_length=-(-length // _BLOCK) * _BLOCK, rows_per_microbatch=1, align=SHARED
    )


def step_flops(shape: str) -> float:
    """Counts the model FLOPs of a step as three times the forward pass: matrix products, the causal
    half of attention, the head at completion tokens only."""
    config = SHAPES[shape]
    forward = forward_flops(config, decoder(config).specs, rows=SEQUENCES, length=LENGTH)
    left_out = 2 * SEQUENCES * PROMPT * config.vocab_size * config.hidden_size
    return 3 * (forward - left_out)
