"""The learner's step as a benchmark, with its expected memory and FLOPs."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run

from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.casts import cast
from jaxrl.core.precision import Precision, jit
from jaxrl.learner.policy import make_learner
from jaxrl.losses.recipes import grpo
from jaxrl.models.decoder import decoder
from jaxrl.models.logprobs import token_logprobs
from jaxrl.models.spec import init

SEQUENCES, LENGTH = 64, PROMPT + ANSWER
LEARNING_RATE, CLIP_NORM = 1e-6, 1.0


class Built(NamedTuple):
    """A compiled step.

    Attributes:
      run: takes one step.
      jaxpr: of the step.
      compile_seconds: time to trace, lower and compile.
      step_bytes: memory of the compiled program: arguments and temporaries.
      live_bytes: memory that a step needs, see `live_bytes`.
    """

    run: Run
    jaxpr: Any
    compile_seconds: float
    step_bytes: int
    live_bytes: int


def learner_step(
    shape: str, *, precision: Precision, rows: int, remat: str, elide: bool = False
) -> Built:
    """Compiles a step of GRPO with AdamW on random weights, `rows` sequences per microbatch; with
    `elide`, XLA may leave out roundings."""
    model = decoder(SHAPES[shape], remat=remat)
    learner = make_learner(
        model,
        grpo().objective,
        optimizer=optax.chain(
            optax.clip_by_global_norm(CLIP_NORM), optax.adamw(LEARNING_RATE, weight_decay=0.0)
        ),
        precision=precision,
        rows_per_microbatch=rows,
    )
    params = init(model.specs, jax.random.key(0), dtype=precision.params)
    state = jit(learner.init)(params)
    minibatch = Minibatch(batch=_batch(shape), microbatches=jnp.int32(SEQUENCES // rows))
    start = time.perf_counter()
    traced = jit(learner.step, donate_argnums=0).trace(state, minibatch)
    step = traced.lower().compile({"xla_allow_excess_precision": elide})
    seconds = time.perf_counter() - start
    memory = step.memory_analysis()
    needed = live_bytes(model, state, minibatch, precision=precision, rows=rows)

    def run(_: int) -> None:
        nonlocal state
        state, metrics = step(state, minibatch)
        jax.block_until_ready((state, metrics))

    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Built(run, traced.jaxpr.jaxpr, seconds, held, needed)


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


def live_bytes(
    model: Any, state: Any, minibatch: Minibatch, *, precision: Precision, rows: int
) -> int:
    """Counts the bytes that a step needs when a microbatch's backward pass begins: state, batch,
    weights in `compute`, both gradients, and residuals of the forward pass."""
    batch = jax.tree.map(lambda x: x[:rows], minibatch.batch)
    weights = jax.eval_shape(lambda p: cast(p, precision.compute), state.params)
    copies = [] if precision.compute == precision.params else [weights]
    accumulated = jax.eval_shape(lambda p: cast(p, precision.grads), state.params)

    def forward(weights: Any) -> jax.Array:
        hidden = model.hidden(
            weights, batch.tokens, batch.positions, batch.segments, precision=precision
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
    c = SHAPES[shape]
    body = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim
    body = c.num_layers * (body + 3 * c.hidden_size * c.intermediate_size)
    head = c.vocab_size * c.hidden_size
    attention = 2 * SEQUENCES * c.num_layers * c.num_heads * c.head_dim * LENGTH**2
    return 3 * (2 * SEQUENCES * LENGTH * body + 2 * SEQUENCES * ANSWER * head + attention)
