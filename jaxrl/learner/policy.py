"""The learner: pure functions over one state.

It computes the scores that an objective needs and evaluates the objective; `jaxrl.learner.update`
takes the step. Nothing here depends on a particular loss, model or mesh.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxrl.core.batch import Minibatch, TokenBatch, observed
from jaxrl.core.casts import as_served, cast
from jaxrl.core.kept import Kept
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision, sampler_precision
from jaxrl.learner.update import LearnerState, by_microbatch, constrainer, make_forward, make_update
from jaxrl.losses.mismatch import mismatch
from jaxrl.losses.objectives import Objective
from jaxrl.losses.scores import Need, Scores, require
from jaxrl.models import lora
from jaxrl.models.expected import Distributions, expected_logprobs
from jaxrl.models.logprobs import token_logprobs, token_logprobs_and_entropy
from jaxrl.models.model import Model
from jaxrl.models.scorer import token_values
from jaxrl.models.spec import Params

VALUE_HEAD = "score"
"""Key in the parameters of the critic head, [1, D], on the policy's trunk."""


class Learner(NamedTuple):
    """Pure functions, to be compiled by the caller or used as they come.

    Attributes:
      init: params -> state before the first step.
      score: (params, minibatch) -> f32[N, T] log-probs of the action tokens, without gradient,
        computed as in `step`. Used for anchor and reference scores. If the batch records the
        experts of its tokens, all functions replay the recorded choice; the routing weights are
        the router's own. If it records the tokens that truncated sampling kept, all log-probs and
        entropies are of the distributions over these tokens alone.
      shadow_scores: (params, minibatch) -> (log-probs as `score`, but of the published weights in
        the sampler's dtypes; entropies of the same distributions in nats), each f32[N, T].
      energies: (params, minibatch) -> f32[N, T], the squared norm of the gradient of each token's
        log-prob by the logits: 1 - 2 p + sum of p^2 over the vocabulary. 0 at other tokens.
      step: (state, minibatch) -> (state, metrics). If the objective weights the whole batch, a
        forward pass computes the weights first; of their metrics those that a term of the loss
        reports, too, begin with "batch/". Returns the metrics of the objective, `losses.mismatch`
        and `Update.step`.
    """

    init: Callable[[Any], LearnerState]  # of Params or lora.Adapted
    score: Callable[[Params, Minibatch], jax.Array]
    shadow_scores: Callable[[Params, Minibatch], tuple[jax.Array, jax.Array]]
    energies: Callable[[Params, Minibatch], jax.Array]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def make_learner(
    model: Model,
    objective: Objective,
    *,
    optimizer: optax.GradientTransformation,
    precision: Precision | str = "fp32",
    param_shardings: Any = None,
    as_published: Callable[[Any], Any] = lora.merge,
) -> Learner:
    """Builds a learner.

    Its functions are plain. Compile once, outermost, with `jaxrl.jit`: `jax.jit` may drop roundings
    that the policy names. Inside your own function call `learner.step` bare: under `jax.lax.scan`
    over minibatches, or under `jax.vmap` over stacked states, for a sweep in one program.

    Args:
      model: tokens -> hidden states, and the temperature of the sampling distribution.
      objective: the loss; only the scores it needs are computed. If it needs values, the parameters
        must hold `VALUE_HEAD` besides the model's.
      optimizer: any optax transformation; it sees unscaled f32 gradients and f32 parameters.
      precision: the dtype policy, or its text, such as "bf16_master".
      param_shardings: tree of shardings that parameters, their compute copies and gradients keep;
        None on a single device.
      as_published: parameters -> the weights that samplers use, before rounding.

    Raises:
      ValueError: if the objective balances experts but the model has none.
    """
    if Need.IMBALANCE in objective.needs and model.hidden_routed is None:
        raise ValueError(
            "the loss balances experts but the model has none; set the coefficient `balance` to 0"
        )
    precision = Precision.of(precision)
    constrain = constrainer(param_shardings)
    constrain_merged = constrainer(lora.merged_shardings(param_shardings))
    sampled, survey_needs = sampler_precision(precision), objective.survey_needs
    as_sampled = by_microbatch(functools.partial(_logprobs, model, precision=sampled))
    entropy = frozenset({Need.ENTROPY})
    with_entropy = by_microbatch(functools.partial(_forward, entropy, model, precision=sampled))
    forward = by_microbatch(functools.partial(_forward, survey_needs, model, precision=precision))
    score = make_score(model, precision=precision, param_shardings=param_shardings)
    energies = make_forward(
        functools.partial(_energies, model, precision=precision),
        precision=precision,
        param_shardings=param_shardings,
    )
    update = make_update(optimizer=optimizer, precision=precision, param_shardings=param_shardings)

    def published(params: Params) -> Params:
        weights: Any = as_published(params)
        served: Any = as_served(weights, precision)
        return constrain(served) if isinstance(weights, lora.Adapted) else constrain_merged(served)

    def shadow_scores(params: Params, minibatch: Minibatch) -> tuple[jax.Array, jax.Array]:
        found = with_entropy(published(params), minibatch)
        return found.logprobs, require(found, Need.ENTROPY)

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        _check(minibatch, state.params, objective.needs)
        before: Metrics = {}
        if objective.whole:
            used = lora.as_computed(state.params, precision)
            weights = (constrain_merged if lora.computes_merged(precision) else constrain)(
                cast(used, precision.compute)
            )
            scores = _with_given(forward(weights, minibatch), survey_needs, minibatch)
            if Need.SHADOW in survey_needs:
                scores = replace(scores, shadow=as_sampled(published(state.params), minibatch))
            scores, before = objective.survey(scores, minibatch.batch)
            minibatch = replace(minibatch, whole=scores.whole)
        denominators = objective.denominators(minibatch.batch, minibatch.whole)
        shadowed = objective.step_needs & {Need.SHADOW, Need.EXPECTED}
        served = published(state.params) if shadowed else None
        given: Any = {"precision": precision, "served": served, "denominators": denominators}
        total = functools.partial(_total, objective, model, **given)
        state, metrics = update.step(state, minibatch, total, denominator=denominators[0])
        return state, _beside(before, metrics)

    return Learner(update.init, score, shadow_scores, energies, step)


def _beside(before: Metrics, metrics: Metrics) -> Metrics:
    """Adds the metrics of weights of the whole batch to those of a step. A name that both have gets
    "batch/" in front: the share that a rejection rejects is not the one among the tokens it left.
    """
    renamed = {f"batch/{name}" if name in metrics else name: one for name, one in before.items()}
    return renamed | metrics


def _total(
    objective: Objective,
    model: Model,
    weights: Params,
    minibatch: Minibatch,
    *,
    precision: Precision,
    served: Params | None,
    denominators: list[jax.Array],
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of a microbatch, to be differentiated. `served`, the published weights, is
    given if the loss needs the shadow; `denominators` are sums over the whole batch."""
    needs, batch = objective.step_needs, minibatch.batch
    sampled, other = sampler_precision(precision), None
    if served is not None and Need.EXPECTED in needs:
        hidden, _ = _hidden(model, served, batch, precision=sampled)
        other = Distributions(hidden, model.gathered_head(served), sampled)
    own = _forward(needs, model, weights, batch, precision=precision, other=other)
    found = _with_given(own, needs, minibatch)
    if served is not None and Need.SHADOW in needs:
        shadow = _logprobs(model, served, batch, precision=sampled)
        found = replace(found, shadow=jax.lax.stop_gradient(shadow))
    value, metrics = objective.total(found, batch, denominators=denominators)
    return value, metrics | mismatch(found.logprobs, batch)


def make_score(
    model: Model, *, precision: Precision | str, param_shardings: Any = None
) -> Callable[[Params, Minibatch], jax.Array]:
    """Builds `Learner.score` for any model; for the arguments see `make_learner`."""
    precision = Precision.of(precision)
    return make_forward(
        functools.partial(_logprobs, model, precision=precision),
        precision=precision,
        param_shardings=param_shardings,
    )


def _with_given(own: Scores, needs: frozenset[Need], minibatch: Minibatch) -> Scores:
    """Adds the scores that a minibatch holds to the learner's own."""
    anchor = minibatch.anchor
    if Need.ANCHOR in needs and anchor is None:
        # One update per rollout: the anchor is the learner itself, at no cost.
        anchor = jax.lax.stop_gradient(own.logprobs)
    return replace(own, anchor=anchor, reference=minibatch.reference, whole=minibatch.whole)


def _forward(
    needs: frozenset[Need],
    model: Model,
    weights: Params,
    batch: TokenBatch,
    *,
    precision: Precision,
    other: Distributions | None = None,
) -> Scores:
    """Computes the scores that the learner's own forward pass gives. `other` are the shadow's
    distributions, given if the loss needs the mean of the log-probs under them."""
    hidden, imbalance = _hidden(model, weights, batch, precision=precision)
    written = observed(batch) if Need.OBSERVED in needs else None
    mask = batch.action_mask if written is None else batch.action_mask | written
    tokens = (hidden, model.gathered_head(weights), batch.tokens, mask)
    kept = None if batch.kept is None else Kept(batch.kept, batch.action_mask)
    entropy, head = None, precision.inside("head")
    if Need.ENTROPY in needs:
        pi, entropy = token_logprobs_and_entropy(*tokens, precision=head, kept=kept)
    else:
        pi = token_logprobs(*tokens, precision=head, kept=kept)
    values = expected = None
    if other is not None:
        own = Distributions(hidden, tokens[1], head)
        expected = expected_logprobs(own, other, batch.action_mask, kept=batch.kept)
    if Need.VALUES in needs:
        values = token_values(hidden, weights[VALUE_HEAD], batch, precision=precision)
    return Scores(
        logprobs=pi if written is None else jnp.where(batch.action_mask, pi, 0),
        entropy=entropy,
        observed=None if written is None else jnp.where(written, pi, 0),
        expected=expected,
        values=values,
        imbalance=imbalance if Need.IMBALANCE in needs else None,
    )


def _hidden(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the hidden states, and the routing's imbalance, None for a dense model. Recorded
    experts are replayed."""
    if model.hidden_routed is None:
        return model.hidden_of(weights, batch, precision=precision), None
    inputs: Any = (weights, batch.tokens, batch.positions, batch.segments)
    kwargs: Any = {"precision": precision, "seen_until": batch.seen_until, "runs": batch.runs}
    return model.hidden_routed(*inputs, **kwargs, recorded=batch.experts)[:2]


def _logprobs(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> jax.Array:
    """Computes the log-probs of the action tokens alone, f32[B, T]."""
    return _forward(frozenset(), model, weights, batch, precision=precision).logprobs


def _energies(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> jax.Array:
    """Computes `Learner.energies`. Half the temperature squares the odds, so twice a token's
    log-prob minus its log-prob there is the log of the sum of squared probabilities."""
    sharper = model._replace(temperature=model.temperature / 2)
    logp, squared = (
        _logprobs(one, weights, batch, precision=precision) for one in (model, sharper)
    )
    collision = jnp.exp(jnp.minimum(2 * logp - squared, 0))
    return jnp.where(batch.action_mask, 1 - 2 * jnp.exp(logp) + collision, 0)


def _check(minibatch: Minibatch, params: Any, needs: frozenset[Need]) -> None:
    chex.assert_rank(minibatch.batch.tokens, 2)
    flat = replace(minibatch.batch, experts=None, kept=None)
    chex.assert_equal_shape(jax.tree.leaves((flat, minibatch.anchor, minibatch.reference)))
    chex.assert_equal_shape_prefix(jax.tree.leaves(minibatch.batch), 2)
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
