"""Builds the critic of a run: a separate network, or a value head on the policy's."""

import dataclasses
import functools

import jax
import optax

from jaxrl import models
from jaxrl.builders.apart import Apart
from jaxrl.builders.model import load_model
from jaxrl.builders.optimizer import make_optimizer, state_shardings
from jaxrl.config.training import Config
from jaxrl.core import Metrics, Minibatch, jit
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import (
    VALUE_HEAD,
    ActorCritic,
    CriticLearner,
    Learner,
    LearnerState,
    Optimizers,
    State,
    make_critic,
    reporting_publish,
    shared_trunk,
    side_by_side,
)
from jaxrl.losses import Recipe
from jaxrl.models import Model, Params, Specs, param_specs
from jaxrl.sharding import Layout, place

_COEFFICIENT = 0.1  # as in TRL; OpenAI has 0.5, for a loss twice as large as ours


def open_critic(
    config: Config,
    recipe: Recipe,
    *,
    checkpoint: Checkpoint,
    learner: Learner,
    model: Model,
    shardings: LearnerState,
    layout: Layout,
) -> tuple[ActorCritic, LearnerState]:
    """Compiles policy and critic together; returns them with the critic's initial state.

    `learner` (not compiled), `model` and `shardings` are the policy's. A separate critic starts
    from `checkpoint`, and raises as `load_model`.
    """
    if config.critic.trunk == "shared":
        pure, params, specs = _shared_trunk(config, recipe, model=model, layout=layout)
    else:
        alone, params, specs = _own_network(config, recipe, checkpoint=checkpoint, layout=layout)
        pure = side_by_side(learner, alone)
    own = state_shardings(config.optimizer, pure.init, params, layout=layout, specs=specs)
    compiled = functools.partial(jit, sums=config.precision.sums)
    step, pretrain = (
        compiled(function, donate_argnums=0, out_shardings=(State(shardings, own), None))
        for function in (pure.step, pure.pretrain)
    )
    critic = pure._replace(values=compiled(pure.values), pretrain=pretrain, step=step)
    return critic, jit(pure.init, out_shardings=own)(params)


def place_critic(
    config: Config, recipe: Recipe, *, checkpoint: Checkpoint, learner: Learner, apart: Apart
) -> tuple[ActorCritic, LearnerState]:
    """Compiles a separate critic for devices of its own; returns it with its initial state, and
    with the policy's `learner`, which is compiled already. Both train at the same time."""
    layout = apart.layout
    pure, params, specs = _own_network(config, recipe, checkpoint=checkpoint, layout=layout)
    own = state_shardings(config.optimizer, pure.init, params, layout=layout, specs=specs)
    sums = config.precision.sums
    values, step = (
        jit(pure.values, sums=sums),
        jit(pure.step, sums=sums, donate_argnums=0, out_shardings=(own, None)),
    )

    def sent(minibatch: Minibatch) -> Minibatch:
        batch = dataclasses.replace(minibatch.batch, experts=None, kept=None)  # of the policy
        return apart.send(dataclasses.replace(minibatch, batch=batch))

    def values_apart(params: Params, minibatch: Minibatch) -> jax.Array:
        return apart.bring(values(params, sent(minibatch)))

    def step_apart(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        return step(state, sent(minibatch))

    critic = CriticLearner(pure.init, values_apart, step_apart)
    return side_by_side(learner, critic), jit(pure.init, out_shardings=own)(params)


def _own_network(
    config: Config, recipe: Recipe, *, checkpoint: Checkpoint, layout: Layout
) -> tuple[CriticLearner, Params, Specs]:
    assert recipe.critic is not None
    scorer, params = load_model(
        checkpoint,
        layout=layout,
        dtype=config.precision.params,
        remat=config.train.remat,
        attention=config.train.attention,
        output="scores",
    )
    critic = make_critic(
        scorer,
        recipe.critic,
        optimizer=_optimizer(config, scorer.specs),
        precision=config.precision,
        param_shardings=layout.constraints(scorer.specs),
    )
    return critic, params, scorer.specs


def _shared_trunk(
    config: Config, recipe: Recipe, *, model: Model, layout: Layout
) -> tuple[ActorCritic, Params, Specs]:
    scorer = param_specs(model.config.as_scorer())
    specs = {VALUE_HEAD: scorer[VALUE_HEAD]}
    pure = shared_trunk(
        model._replace(temperature=config.sampling.temperature),
        recipe,
        coefficient=_COEFFICIENT,
        optimizers=Optimizers(
            make_optimizer(
                config.optimizer, total_steps=config.policy_steps, specs=model.specs
            ).transformation,
            _optimizer(config, specs),
        ),
        precision=config.precision,
        param_shardings=layout.constraints({**model.specs, **specs}),
    )
    step = reporting_publish(
        pure.step, params_of=lambda states: states.policy.params, precision=config.precision
    )
    # Its spec says zeros.
    head = models.init(specs, jax.random.key(0), dtype=config.precision.params)
    return pure._replace(step=step), place(head, layout.tree(specs)), specs


def _optimizer(config: Config, specs: Specs) -> optax.GradientTransformation:
    """Makes the optimizer of a critic, or of a value head."""
    return make_optimizer(
        config.optimizer.model_copy(update={"learning_rate": config.critic.learning_rate}),
        total_steps=config.optimizer_steps,
        specs=specs,
    ).transformation
