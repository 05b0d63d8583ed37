"""The optimizer step, for any loss.

A step sums gradients over microbatches, divided by the denominator of the whole batch, removes the
loss scale and applies the optimizer. A non-finite gradient skips the update: only the loss scale
and the step count change.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.casts import cast
from jaxrl.core.loss_scale import LossScale, init_loss_scale, update_loss_scale
from jaxrl.core.metrics import Latest, Mean, Metrics
from jaxrl.core.precision import Precision
from jaxrl.learner.rounding import absorbed
from jaxrl.models import lora
from jaxrl.models.spec import Params


@struct.dataclass
class LearnerState:
    """Everything that a step changes, plus frozen parameters. See `checkpoint_view`. A tree of
    arrays, which can be donated, stacked, or saved by orbax as it is."""

    step: jax.Array  # i32[], optimizer steps taken, skipped ones included
    params: Any  # Params in precision.params; or lora.Adapted, whose frozen part is in any dtype
    opt_state: Any  # moments in precision.moments
    loss_scale: LossScale


def checkpoint_view(state: LearnerState) -> LearnerState:
    """Returns the part of a state that is checkpointed: all but frozen parameters, which are
    reloaded from the initial model."""
    return dataclasses.replace(state, params=lora.trainable(state.params))


def from_checkpoint(view: LearnerState, *, like: LearnerState) -> LearnerState:
    """Inverts `checkpoint_view`, with the frozen parameters of `like`."""
    return dataclasses.replace(view, params=lora.with_trainable(like.params, view.params))


def applied_steps(state: LearnerState) -> int:
    """Returns the number of optimizer steps applied; skipped steps are not counted."""
    return int(state.step) - int(state.loss_scale.skipped)


class Update(NamedTuple):
    """Pure functions common to all learners.

    Attributes:
      init: params -> state before the first step.
      step: (state, minibatch, total, denominator=f32[]) -> (state, metrics): the metrics of the
        loss, and "loss", "grad_norm" (before clipping), "loss_scale", "skipped_steps" (since the
        start). With parameters of fewer than 32 bits also "update/absorbed": the share of the
        optimizer's updates, other than 0, that rounding to `params` takes away.
      apply: (state, gradients in f32, without the loss scale) -> (state, metrics): the end of a
        step, for gradients that were summed elsewhere; "loss" is not among the metrics.
    """

    init: Callable[[Any], LearnerState]
    step: Callable[..., tuple[LearnerState, Metrics]]
    apply: Callable[[LearnerState, Any], tuple[LearnerState, Metrics]]


Rows = TypeVar("Rows")  # a tree of arrays [N, ...]
# (weights in precision.compute, a microbatch) -> (sum of losses, metrics): the loss, before its
# division by the denominator of the whole batch.
Total = Callable[[Params, Minibatch], tuple[jax.Array, Metrics]]


def make_update(
    *,
    optimizer: optax.GradientTransformation,
    precision: Precision | str,
    param_shardings: Any = None,
) -> Update:
    """Builds the optimizer step of losses that are sums over a batch.

    Args:
      optimizer: any optax transformation; it sees unscaled f32 gradients and f32 parameters.
      precision: the dtype policy, or its text.
      param_shardings: tree of shardings that parameters, their compute copies and gradients keep;
        None on a single device.
    """
    precision = Precision.of(precision)
    constrain, constrain_trained = (
        constrainer(part(_shardings(param_shardings, precision)))
        for part in (lambda tree: tree, lora.trainable)
    )

    def step(
        state: LearnerState, minibatch: Minibatch, total: Total, *, denominator: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        denominator = jnp.where(denominator > 0, denominator, 1.0)
        weights = constrain(cast(lora.as_computed(state.params, precision), precision.compute))

        def scaled_loss(trained: Params, rows: Minibatch) -> tuple[jax.Array, Any]:
            value, metrics = total(lora.with_trainable(weights, trained), rows)
            return value * (state.loss_scale.scale / denominator), (value, metrics)

        def one(trained: Params, rows: Minibatch) -> Any:
            grads, aux = jax.grad(scaled_loss, has_aux=True)(trained, rows)
            return constrain_trained(cast(grads, precision.grads)), aux

        size, rows = _microbatch_size(minibatch), dataclasses.replace(minibatch, microbatches=None)
        summed: Any = one
        if size < len(minibatch.batch.tokens):  # one microbatch is a sum already
            summed = optax.microbatching.microbatch(
                jax.jit(one, inline=True),  # microbatch calls it twice, jit traces it once
                argnums=1,
                microbatch_size=size,
                accumulator=optax.microbatching.AccumulationType.SUM,
                num_real_microbatches=minibatch.microbatches,
            )
        grads, (value, metrics) = summed(lora.trainable(weights), rows)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale.scale, grads)
        if lora.computes_merged(precision):
            grads = lora.of_adapters(state.params, grads)
        state, own = apply(state, grads)
        own["loss"] = Mean(value, denominator)
        if taken := sorted(metrics.keys() & own.keys()):
            raise ValueError(
                f"the loss has metrics {', '.join(map(repr, taken))}, which are names of the "
                "learner's own; give them other names"
            )
        return state, metrics | own

    def apply(state: LearnerState, grads: Any) -> tuple[LearnerState, Metrics]:
        grad_norm = optax.tree.norm(grads)
        new_state, lost = _apply(state, grads, jnp.isfinite(grad_norm), optimizer, precision)
        # A step that changes a shape or dtype of its state would recompile at the next call.
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        own = {
            "grad_norm": _once(grad_norm),
            "loss_scale": _once(state.loss_scale.scale, kind=Latest),
            "skipped_steps": _once(new_state.loss_scale.skipped, kind=Latest),
        }
        return new_state, own | lost

    def init(params: Any) -> LearnerState:
        trained = cast(lora.trainable(params), precision.params)
        master = cast(trained, jnp.dtype(jnp.float32))
        return LearnerState(
            step=jnp.int32(0),
            params=lora.with_trainable(params, trained),
            opt_state=cast(optimizer.init(master), precision.moments),
            loss_scale=init_loss_scale(precision.loss_scale),
        )

    return Update(init, step, apply)


def make_forward(
    fn: Callable[[Params, TokenBatch], Rows], *, precision: Precision, param_shardings: Any = None
) -> Callable[[Params, Minibatch], Rows]:
    """Wraps `fn` as `by_microbatch` does, and casts the parameters of a state to the weights that
    `fn` takes. For the other arguments see `make_update`."""
    constrain = constrainer(_shardings(param_shardings, precision))
    rows = by_microbatch(fn)

    def score(params: Params, minibatch: Minibatch) -> Rows:
        used = lora.as_computed(params, precision)
        return rows(constrain(cast(used, precision.compute)), minibatch)

    return score


def by_microbatch(fn: Callable[[Params, TokenBatch], Rows]) -> Callable[[Params, Minibatch], Rows]:
    """Wraps `fn` to run over the microbatches of a minibatch in turn. The results are arrays
    [N, ...] in the minibatch's rows; unused rows are 0."""

    def apply(weights: Params, minibatch: Minibatch) -> Rows:
        concatenated = optax.microbatching.microbatch(
            jax.jit(fn, inline=True),  # traced once, as above
            argnums=1,
            microbatch_size=_microbatch_size(minibatch),
            accumulator=optax.microbatching.AccumulationType.CONCAT,
            num_real_microbatches=minibatch.microbatches,
        )
        return concatenated(weights, minibatch.batch)

    return apply


def _microbatch_size(minibatch: Minibatch) -> int:
    rows, size = minibatch.batch.tokens.shape[0], minibatch.rows_per_microbatch
    if rows % size:
        raise ValueError(
            f"a minibatch of {rows} rows does not divide into microbatches of {size}; pad it with "
            "packing.pack_minibatch"
        )
    return size


def constrainer(shardings: Any) -> Callable[[Params], Params]:
    """Returns a function that constrains a tree to these shardings; None constrains nothing."""
    if shardings is None:
        return lambda tree: tree
    return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)


def _shardings(shardings: Any, precision: Precision) -> Any:
    """Returns the shardings of `lora.as_computed`."""
    return lora.merged_shardings(shardings) if lora.computes_merged(precision) else shardings


def _apply(
    state: LearnerState,
    grads: Params,
    finite: jax.Array,
    optimizer: optax.GradientTransformation,
    precision: Precision,
) -> tuple[LearnerState, Metrics]:
    """Applies the optimizer's update; skips it where `finite` is False. Returns the new state and
    "update/absorbed"."""
    f32 = jnp.dtype(jnp.float32)
    trained = lora.trainable(state.params)
    # Moments offloaded to host memory are fetched for the update and put back after it.
    fetched = jax.tree.map(_move, state.opt_state)
    master, moments = cast(trained, f32), cast(fetched, f32)
    with jax.default_matmul_precision("highest"):  # products of an optimizer, such as muon's
        updates, moments = optimizer.update(grads, moments, master)
    params = cast(optax.apply_updates(master, updates), precision.params)
    opt_state = cast(moments, precision.moments)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(finite, new, old)

    opt_state = jax.tree.map(keep, opt_state, fetched)
    metrics: Metrics = {}
    if precision.params.itemsize < f32.itemsize:
        metrics["update/absorbed"] = absorbed(updates, trained, params, finite=finite)
    new_state = LearnerState(
        step=state.step + 1,
        params=lora.with_trainable(state.params, jax.tree.map(keep, params, trained)),
        opt_state=jax.tree.map(_move, opt_state, state.opt_state),
        loss_scale=update_loss_scale(state.loss_scale, finite, spec=precision.loss_scale),
    )
    return new_state, metrics


def _move(x: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """Moves an array to the memory space of `like`; by default to device memory."""
    wanted = jax.memory.Space.Device if like is None else jax.typeof(like).memory_space
    return x if jax.typeof(x).memory_space == wanted else jax.device_put(x, wanted)


def _once(value: jax.Array, *, kind: type[Mean] = Mean) -> Mean:
    return kind(value.astype(jnp.float32), jnp.float32(1))
