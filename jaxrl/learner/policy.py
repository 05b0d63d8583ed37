"""The learner: pure functions over one state.

It computes the scores that an objective needs and evaluates the objective; `jaxrl.learner.update`
takes the step. Nothing here depends on a particular loss, model or mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxrl.core.batch import Minibatch, TokenBatch, observed
from jaxrl.core.casts import as_served, cast
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision, sampler_precision
from jaxrl.learner.update import LearnerState, by_microbatch, constrainer, make_update
from jaxrl.losses.mismatch import mismatch
from jaxrl.losses.objectives import Objective
from jaxrl.losses.scores import Need, Scores
from jaxrl.models import lora
from jaxrl.models.decoder import Model
from jaxrl.models.logprobs import token_logprobs, token_logprobs_and_entropy
from jaxrl.models.scorer import token_values
from jaxrl.models.spec import Params

# Key in the parameters of the critic head, [1, D], on the policy's trunk.
VALUE_HEAD = "score"


class Learner(NamedTuple):
    """Pure functions, to be compiled by the caller or used as they come.

    Attributes:
      init: params -> state before the first step.
      score: (params, minibatch) -> f32[N, T] log-probs of the action tokens, without gradient,
        computed as in `step`. Used for anchor and reference scores. If the batch records the
        experts of its tokens, `score`, `shadow` and `step` replay them: the routing weights are
        the router's own, the choice of experts is the recorded one.
      shadow: as `score`, with the published weights and in the sampler's dtypes.
      shadow_scores: (log-probs of `shadow`, entropies of the same distributions in nats), each
        f32[N, T].
      step: (state, minibatch) -> (state, metrics). Weights of the whole batch, if the objective has
        any, are computed first, by a forward pass. `metrics` has the objective's, those of
        `losses.mismatch`, and "loss", "grad_norm" (before clipping), "loss_scale",
        "skipped_steps" (since the start).
    """

    init: Callable[[Any], LearnerState]  # of Params or lora.Adapted
    score: Callable[[Params, Minibatch], jax.Array]
    shadow: Callable[[Params, Minibatch], jax.Array]
    shadow_scores: Callable[[Params, Minibatch], tuple[jax.Array, jax.Array]]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def make_learner(
    model: Model,
    objective: Objective,
    *,
    optimizer: optax.GradientTransformation,
    precision: Precision,
    rows_per_microbatch: int,
    param_shardings: Any = None,
    as_published: Callable[[Any], Any] = lora.merge,
) -> Learner:
    """Builds a learner.

    Args:
      model: tokens -> hidden states, and the temperature of the sampling distribution.
      objective: the loss; only the scores it needs are computed. If it needs values, the parameters
        must hold `VALUE_HEAD` besides the model's.
      optimizer: any optax transformation; it sees unscaled f32 gradients and f32 parameters.
      precision: the dtype policy.
      rows_per_microbatch: rows computed at once; divides the rows of every minibatch.
      param_shardings: tree of shardings that parameters, their compute copies and gradients keep;
        None on a single device.
      as_published: parameters -> the weights that samplers use, before rounding.

    Raises:
      ValueError: if the objective balances experts but the model has none.
    """
    constrain = constrainer(param_shardings)
    constrain_merged = constrainer(lora.frozen(param_shardings))
    common: Any = {
        "precision": precision,
        "rows_per_microbatch": rows_per_microbatch,
        "param_shardings": param_shardings,
    }
    score = make_score(model, **common)
    sampled = sampler_precision(precision)
    by_rows = functools.partial(by_microbatch, rows_per_microbatch=rows_per_microbatch)
    as_sampled = by_rows(_score_fn(model, precision=sampled))
    if Need.IMBALANCE in objective.needs and model.hidden_routed is None:
        raise ValueError(
            "the loss balances experts but the model has none; set the coefficient `balance` to 0"
        )

    survey = _survey_fn(
        model, objective, precision=precision, rows_per_microbatch=rows_per_microbatch
    )
    needs_replay = Need.SHADOW in objective.survey_needs

    def published(params: Params) -> Params:
        weights: Any = as_published(params)
        served: Any = as_served(weights, precision)
        return constrain(served) if isinstance(weights, lora.Adapted) else constrain_merged(served)

    def shadow(params: Params, minibatch: Minibatch) -> jax.Array:
        return as_sampled(published(params), minibatch)

    def shadow_scores(params: Params, minibatch: Minibatch) -> tuple[jax.Array, jax.Array]:
        both = functools.partial(_logprobs_and_entropy, model, precision=sampled)
        return by_rows(both)(published(params), minibatch)

    total = _total_fn(model, objective, precision=precision)
    update = make_update(total, optimizer=optimizer, **common)

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        _check(minibatch, state.params, objective.needs, rows_per_microbatch=rows_per_microbatch)
        before: Metrics = {}
        if objective.whole:
            weights = constrain(cast(state.params, precision.compute))
            replay = shadow(state.params, minibatch) if needs_replay else None
            minibatch, before = survey(weights, minibatch, replay)
        denominators = objective.denominators(minibatch.batch, minibatch.whole)
        served = published(state.params) if Need.SHADOW in objective.step_needs else None
        state, metrics = update.step(
            state, minibatch, fixed=(served, denominators), denominator=denominators[0]
        )
        return state, before | metrics

    return Learner(update.init, score, shadow, shadow_scores, step)


def _total_fn(
    model: Model, objective: Objective, *, precision: Precision
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Builds the loss of a microbatch, to be differentiated."""
    as_sampled = _score_fn(model, precision=sampler_precision(precision))

    def total(
        weights: Params, minibatch: Minibatch, fixed: tuple[Params | None, list[jax.Array]]
    ) -> tuple[jax.Array, Metrics]:
        served, denominators = fixed
        replay = None if served is None else as_sampled(served, minibatch.batch)
        found = _scores(objective.step_needs, model, weights, minibatch, precision=precision)
        if replay is not None:
            found = dataclasses.replace(found, shadow=jax.lax.stop_gradient(replay))
        value, metrics = objective.total(found, minibatch.batch, denominators=denominators)
        return value, metrics | mismatch(found.logprobs, minibatch.batch)

    return total


def _survey_fn(
    model: Model,
    objective: Objective,
    *,
    precision: Precision,
    rows_per_microbatch: int,
) -> Callable[[Params, Minibatch, jax.Array | None], tuple[Minibatch, Metrics]]:
    """Builds the forward pass that computes the weights of the whole batch, without gradient."""
    needs = objective.survey_needs
    forward = functools.partial(_forward, needs, model, precision=precision)
    rows = by_microbatch(forward, rows_per_microbatch=rows_per_microbatch)

    def survey(
        weights: Params, minibatch: Minibatch, replay: jax.Array | None
    ) -> tuple[Minibatch, Metrics]:
        own = rows(weights, minibatch)
        scores = dataclasses.replace(_with_given(own, needs, minibatch), shadow=replay)
        scores, metrics = objective.survey(scores, minibatch.batch)
        return dataclasses.replace(minibatch, whole=scores.whole), metrics

    return survey


def make_score(
    model: Model,
    *,
    precision: Precision,
    rows_per_microbatch: int,
    param_shardings: Any = None,
) -> Callable[[Params, Minibatch], jax.Array]:
    """Builds `Learner.score` for any model; the arguments are those of `make_learner`."""
    constrain = constrainer(param_shardings)
    logprobs = _score_fn(model, precision=precision)

    def score(params: Params, minibatch: Minibatch) -> jax.Array:
        weights = constrain(cast(params, precision.compute))
        return by_microbatch(logprobs, rows_per_microbatch=rows_per_microbatch)(weights, minibatch)

    return score


def _scores(
    needs: frozenset[Need],
    model: Model,
    weights: Params,
    minibatch: Minibatch,
    *,
    precision: Precision,
) -> Scores:
    """Computes the scores that a loss needs, all but the shadow."""
    own = _forward(needs, model, weights, minibatch.batch, precision=precision)
    return _with_given(own, needs, minibatch)


def _with_given(own: Scores, needs: frozenset[Need], minibatch: Minibatch) -> Scores:
    """Adds the scores that a minibatch holds to the learner's own."""
    anchor = minibatch.anchor
    if Need.ANCHOR in needs and anchor is None:
        # One update per rollout: the anchor is the learner itself, at no cost.
        anchor = jax.lax.stop_gradient(own.logprobs)
    return dataclasses.replace(
        own, anchor=anchor, reference=minibatch.reference, whole=minibatch.whole
    )


def _forward(
    needs: frozenset[Need],
    model: Model,
    weights: Params,
    batch: TokenBatch,
    *,
    precision: Precision,
) -> Scores:
    """Computes the scores that the learner's own forward pass gives."""
    hidden, imbalance = _hidden(model, weights, batch, precision=precision)
    written = observed(batch) if Need.OBSERVED in needs else None
    mask = batch.action_mask if written is None else batch.action_mask | written
    tokens = (hidden, model.head(weights), batch.tokens, mask)
    if Need.ENTROPY in needs:
        pi, entropy = token_logprobs_and_entropy(*tokens, precision=precision)
    else:
        pi = token_logprobs(*tokens, precision=precision)
        entropy = None
    values = None
    if Need.VALUES in needs:
        values = token_values(hidden, weights[VALUE_HEAD], batch, precision=precision)
    return Scores(
        logprobs=pi if written is None else jnp.where(batch.action_mask, pi, 0),
        entropy=entropy,
        observed=None if written is None else jnp.where(written, pi, 0),
        values=values,
        imbalance=imbalance if Need.IMBALANCE in needs else None,
    )


def _score_fn(model: Model, *, precision: Precision) -> Callable[[Params, TokenBatch], jax.Array]:
    def score(weights: Params, batch: TokenBatch) -> jax.Array:
        hidden, _ = _hidden(model, weights, batch, precision=precision)
        return token_logprobs(
            hidden,
            model.head(weights),
            tokens=batch.tokens,
            mask=batch.action_mask,
            precision=precision,
        )

    return score


def _logprobs_and_entropy(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> tuple[jax.Array, jax.Array]:
    hidden, _ = _hidden(model, weights, batch, precision=precision)
    tokens = (hidden, model.head(weights), batch.tokens, batch.action_mask)
    return token_logprobs_and_entropy(*tokens, precision=precision)


def _hidden(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> tuple[jax.Array, jax.Array | None]:
    """Computes hidden states and, for a mixture of experts, its imbalance."""
    inputs = (weights, batch.tokens, batch.positions, batch.segments)
    kwargs: Any = {"precision": precision, "seen_until": batch.seen_until}
    if model.hidden_routed is None:
        return model.hidden(*inputs, **kwargs), None
    routed = model.hidden_routed(*inputs, **kwargs, recorded=batch.experts)
    return routed.hidden, routed.imbalance


def _check(
    minibatch: Minibatch, params: Any, needs: frozenset[Need], *, rows_per_microbatch: int
) -> None:
    chex.assert_rank(minibatch.batch.tokens, 2)
    flat = dataclasses.replace(minibatch.batch, experts=None)
    chex.assert_equal_shape(jax.tree.leaves((flat, minibatch.anchor, minibatch.reference)))
    chex.assert_equal_shape_prefix(jax.tree.leaves(minibatch.batch), 2)
    rows = minibatch.batch.tokens.shape[0]
    if rows % rows_per_microbatch:
        raise ValueError(
            f"a minibatch of {rows} rows does not divide into microbatches of "
            f"{rows_per_microbatch}; pad it with packing.pack_minibatch"
        )
    if Need.VALUES in needs and VALUE_HEAD not in params:
        raise ValueError(
            "the loss needs a critic's values but the parameters have no value head; see "
            "actor_critic.shared_trunk"
        )
    if Need.REFERENCE in needs and minibatch.reference is None:
        raise ValueError(
            "the loss needs reference scores but the minibatch has none; score the reference "
            "parameters with Learner.score, or set the KL coefficient to 0"
        )
