"""Joint training of a policy and its critic.

The critic is a separate network or a head on the policy's trunk. Either has its own state, so the
policy's parameters remain a plain language model: the head is never published, exported or sampled
from.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl.core.batch import Minibatch
from jaxrl.core.casts import cast
from jaxrl.core.loss_scale import init_loss_scale
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision
from jaxrl.learner.critic import CriticLearner, critic_values, named, value_total, values_around
from jaxrl.learner.policy import VALUE_HEAD, Learner, make_learner
from jaxrl.learner.update import LearnerState, by_microbatch, constrainer, make_update
from jaxrl.losses import Recipe
from jaxrl.models.model import Model
from jaxrl.models.spec import Params


class State(NamedTuple):
    """Learner states of the policy and, if the recipe has one, of the critic."""

    policy: LearnerState
    critic: LearnerState | None = None

    @property
    def critic_state(self) -> LearnerState:
        """The critic's state; the recipe must have a critic."""
        assert self.critic is not None, "a run without a critic has no values"
        return self.critic


def with_new_loss_scale(state: State, precision: Precision | str) -> State:
    """Resets the loss scale to the initial one of `precision`, for a run resumed under a new dtype
    policy. The count of skipped steps is kept."""
    spec = Precision.of(precision).loss_scale

    def begun(learner: LearnerState) -> LearnerState:
        old = learner.loss_scale
        new = dataclasses.replace(init_loss_scale(spec), skipped=old.skipped)
        scale = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), new, old)
        return dataclasses.replace(learner, loss_scale=scale)

    return State(begun(state.policy), None if state.critic is None else begun(state.critic))


class ActorCritic(NamedTuple):
    """Pure functions, to be compiled by the caller or used as they come.

    Attributes:
      init: the critic's params -> its state before the first step.
      values: (states, minibatch) -> f32[N, T, 2], as `CriticLearner.values`.
      pretrain: (states, minibatch) -> (states, metrics), as `CriticLearner.step`; the policy is
        unchanged, bit for bit.
      step: (states, minibatch) -> (states, metrics); updates both.
    """

    init: Callable[[Params], LearnerState]
    values: Callable[[State, Minibatch], jax.Array]
    pretrain: Callable[[State, Minibatch], tuple[State, Metrics]]
    step: Callable[[State, Minibatch], tuple[State, Metrics]]


class Optimizers(NamedTuple):
    """Optimizers of one network's two parts."""

    policy: optax.GradientTransformation
    head: optax.GradientTransformation


def side_by_side(learner: Learner, critic: CriticLearner) -> ActorCritic:
    """Combines two networks, each with its own loss, gradient and optimizer."""

    def values(states: State, minibatch: Minibatch) -> jax.Array:
        return critic.values(states.critic_state.params, minibatch)

    def pretrain(states: State, minibatch: Minibatch) -> tuple[State, Metrics]:
        state, metrics = critic.step(states.critic_state, minibatch)
        return states._replace(critic=state), metrics

    def step(states: State, minibatch: Minibatch) -> tuple[State, Metrics]:
        state, metrics = critic.step(states.critic_state, minibatch)
        policy, more = learner.step(states.policy, minibatch)
        return State(policy, state), metrics | more

    return ActorCritic(critic.init, values, pretrain, step)


def shared_trunk(
    model: Model,
    recipe: Recipe,
    *,
    coefficient: float,
    optimizers: Optimizers,
    precision: Precision | str,
    param_shardings: Any = None,
) -> ActorCritic:
    """Builds one network whose critic is a head {"score": [1, D]} on the policy's hidden states.

    The loss is the policy's + `coefficient` x the critic's, reduced as the policy's. Both terms
    send gradient to the trunk. Policy and head are clipped and updated separately, each by its
    optimizer. Pre-training updates the head only. For the other arguments see `make_learner`;
    `param_shardings` includes the head.

    Raises:
      ValueError: if the recipe has no critic.
    """
    critic = recipe.critic
    if critic is None:
        raise ValueError("shared_trunk needs a recipe with a critic, such as ppo")
    precision = Precision.of(precision)
    scorer = model._replace(unembedding=lambda params: params[VALUE_HEAD])
    joint = make_learner(
        model,
        recipe.objective + coefficient * critic.objective.loss,
        optimizer=_apart(optimizers),
        precision=precision,
        param_shardings=param_shardings,
    )
    constrain = constrainer(param_shardings)
    values_of = functools.partial(critic_values, scorer, precision=precision)
    around = functools.partial(values_around, scorer, precision=precision)

    alone = make_update(optimizer=optimizers.head, precision=precision)

    def whole(states: State) -> Params:
        return constrain(cast(states.policy.params | states.critic_state.params, precision.compute))

    def values(states: State, minibatch: Minibatch) -> jax.Array:
        return by_microbatch(around)(whole(states), minibatch)

    def pretrain(states: State, minibatch: Minibatch) -> tuple[State, Metrics]:
        trunk = whole(states)

        def total(head: Params, rows: Minibatch) -> tuple[jax.Array, Metrics]:
            return value_total(critic, values_of(trunk | head, rows.batch), batch=rows.batch)

        denominator = critic.objective.denominator(minibatch.batch)
        head, metrics = alone.step(states.critic_state, minibatch, total, denominator=denominator)
        return states._replace(critic=head), named(metrics)

    def step(states: State, minibatch: Minibatch) -> tuple[State, Metrics]:
        state, metrics = joint.step(_joined(states), minibatch)
        return _divided(state, critic=states.critic_state), metrics

    return ActorCritic(alone.init, values, pretrain, step)


def _apart(optimizers: Optimizers) -> optax.GradientTransformation:
    """Applies each optimizer to its own parameters; the state is a pair of optimizer states."""

    def init(params: Any) -> Any:
        policy, head = _split(params)
        return optimizers.policy.init(policy), optimizers.head.init(head)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        (grads, head_grads), (policy, head) = _split(updates), _split(params)
        found: Any = optimizers.policy.update(grads, state[0], policy)
        more: Any = optimizers.head.update(head_grads, state[1], head)
        return found[0] | more[0], (found[1], more[1])

    return optax.GradientTransformation(init, update)


def _split(params: Params) -> tuple[Params, Params]:
    """Splits parameters into the policy's and the head."""
    policy = {name: value for name, value in params.items() if name != VALUE_HEAD}
    return policy, {VALUE_HEAD: params[VALUE_HEAD]}


def _joined(states: State) -> LearnerState:
    """Merges both states into one; the step count and loss scale are the policy's."""
    policy, critic = states.policy, states.critic_state
    return dataclasses.replace(
        policy, params=policy.params | critic.params, opt_state=(policy.opt_state, critic.opt_state)
    )


def _divided(state: LearnerState, *, critic: LearnerState) -> State:
    """Inverts `_joined`; `critic` is its state before the step."""
    params, head = _split(state.params)
    own, head_own = state.opt_state
    return State(
        dataclasses.replace(state, params=params, opt_state=own),
        dataclasses.replace(critic, step=critic.step + 1, params=head, opt_state=head_own),
    )
