"""The learner's step as a benchmark, with its expected memory and FLOPs: on full rows, and on
groups of completions with and without shared prompts."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run

from jaxrl.commands.plan.roofline import forward_flops
from jaxrl.core.batch import Minibatch, TokenBatch, given_rollout
from jaxrl.core.casts import cast
from jaxrl.core.packing import SHARED, MinibatchShape, pack_minibatch
from jaxrl.core.precision import Precision, jit
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo
from jaxrl.models.decoder import Model, decoder
from jaxrl.models.families import DecoderConfig
from jaxrl.models.logprobs import token_logprobs
from jaxrl.models.spec import init

SEQUENCES, LENGTH = 64, PROMPT + ANSWER
LEARNING_RATE, CLIP_NORM = 1e-6, 1.0
_BLOCK = 128  # tokens, of which rows with shared prompts are multiples


class Built(NamedTuple):
    """A compiled step.

    Attributes:
      run: takes one step.
      jaxpr: of the step.
      passes: tokens that pass through the layers.
      compile_seconds: time to trace, lower and compile.
      mib: memory of the compiled program: arguments and temporaries.
      live_mib: memory that a step needs, see `_live_bytes`.
    """

    run: Run
    jaxpr: Any
    passes: int
    compile_seconds: float
    mib: float
    live_mib: float


class Groups(NamedTuple):
    """Groups of completions: their number, completions of a group, tokens of prompts and
    completions."""

    count: int
    size: int
    prompt: int
    completion: int


def learner_step(
    shape: str, *, precision: Precision, rows: int, remat: str, elide: bool = False
) -> Built:
    """Compiles a step of GRPO with AdamW on random weights, `rows` sequences per microbatch; with
    `elide`, XLA may leave out roundings."""
    minibatch = Minibatch(batch=_batch(shape), microbatches=jnp.int32(SEQUENCES // rows))
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), optax.adamw(LEARNING_RATE, weight_decay=0.0)
    )
    model = decoder(SHAPES[shape], remat=remat)
    return _compiled(model, minibatch, optimizer, precision=precision, rows=rows, elide=elide)


def group_step(
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
    return _compiled(
        decoder(config, remat=remat),
        minibatch,
        optax.adamw(LEARNING_RATE),
        precision=precision,
        rows=shape.rows_per_microbatch,
    )


def _row_shape(work: Groups, *, microbatch: int, shared: bool) -> MinibatchShape:
    alone = work.prompt + work.completion
    if not shared:
        return MinibatchShape(row_length=alone, rows_per_microbatch=max(1, microbatch // alone))
    group = work.prompt + work.size * (work.completion + 1)
    length = max(1, microbatch // group) * group
    return MinibatchShape(
        row_length=-(-length // _BLOCK) * _BLOCK, rows_per_microbatch=1, align=SHARED
    )


def _compiled(
    model: Model,
    minibatch: Minibatch,
    optimizer: optax.GradientTransformation,
    *,
    precision: Precision,
    rows: int,
    elide: bool = False,
) -> Built:
    learner = make_learner(
        model,
        grpo().objective,
        optimizer=optimizer,
        precision=precision,
        rows_per_microbatch=rows,
    )
    state = jit(learner.init)(init(model.specs, jax.random.key(0), dtype=precision.params))
    start = time.perf_counter()
    traced = jit(learner.step, donate_argnums=0).trace(state, minibatch)
    step = traced.lower().compile({"xla_allow_excess_precision": elide})
    seconds = time.perf_counter() - start
    memory = step.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = _live_bytes(model, state, minibatch, precision=precision, rows=rows)

    def run(_: int) -> None:
        nonlocal state
        state, metrics = step(state, minibatch)
        jax.block_until_ready((state, metrics))

    passes = minibatch.batch.tokens.size
    return Built(run, traced.jaxpr.jaxpr, passes, seconds, held / 2**20, needed / 2**20)


def _batch(shape: str) -> TokenBatch:
    """Builds full rows of one sequence each; sampler log-probs are those of a uniform policy with
    noise, close to random weights."""
    rng = np.random.default_rng(0)
    size, vocab = (SEQUENCES, LENGTH), SHAPES[shape].vocab_size
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), size)
    return TokenBatch(
        tokens=jnp.asarray(rng.integers(100, vocab, size), jnp.int32),
        segments=jnp.ones(size, jnp.int32),
        positions=jnp.asarray(positions),
        action_mask=jnp.asarray(positions >= PROMPT),
        sampler_logprobs=jnp.asarray(rng.normal(-np.log(vocab), 0.1, size), jnp.float32),
        advantages=jnp.asarray(rng.normal(size=(SEQUENCES, 1)) * np.ones(size), jnp.float32),
    )


def _live_bytes(
    model: Model, state: Any, minibatch: Minibatch, *, precision: Precision, rows: int
) -> int:
    """Counts the bytes that a step needs when a microbatch's backward pass begins: state, batch,
    weights in `compute`, both gradients, and residuals of the forward pass."""
    batch = jax.tree.map(lambda x: x[:rows], minibatch.batch)
    weights = jax.eval_shape(lambda p: cast(p, precision.compute), state.params)
    copies = [] if precision.compute == precision.params else [weights]
    accumulated = jax.eval_shape(lambda p: cast(p, precision.grads), state.params)

    def forward(weights: Any) -> jax.Array:
        hidden = model.hidden(
            weights,
            batch.tokens,
            batch.positions,
            batch.segments,
            precision=precision,
            seen_until=batch.seen_until,
        )
        return token_logprobs(
            hidden, model.head(weights), batch.tokens, batch.action_mask, precision=precision
        )

    kept = jax.tree.leaves(jax.eval_shape(lambda w: jax.vjp(forward, w)[1], weights))
    own = {x.shape for x in jax.tree.leaves(weights)}
    kept = [x for x in kept if x.shape not in own]
    leaves = jax.tree.leaves((state, minibatch, copies, accumulated, weights, kept))
    return sum(x.size * x.dtype.itemsize for x in leaves)


def step_flops(shape: str) -> float:
    """Counts the model FLOPs of a step as three times the forward pass: matrix products, the causal
    half of attention, the head at completion tokens only."""
    config = SHAPES[shape]
    forward = forward_flops(config, decoder(config).specs, rows=SEQUENCES, length=LENGTH)
    left_out = 2 * SEQUENCES * PROMPT * config.vocab_size * config.hidden_size
    return 3 * (forward - left_out)
