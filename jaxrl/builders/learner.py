"""Builds what a run trains: the policy, its reference and its critic, compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl.builders.critic import open_critic
from jaxrl.builders.minibatches import minibatch_shape
from jaxrl.builders.model import attention_note, load_trained, trained_specs
from jaxrl.builders.optimizer import Optimizer, make_optimizer, state_shardings
from jaxrl.config.tables import LoraConfig
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.packing import MinibatchShape
from jaxrl.learner.actor_critic import ActorCritic, State
from jaxrl.learner.policy import Learner, make_learner
from jaxrl.losses import Need, Objective, Recipe
from jaxrl.models import lora
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from sharding.partition import Layout


class Learning(NamedTuple):
    """The compiled policy and critic of a run.

    Attributes:
      recipe: the loss and the advantages.
      layout: the learner's devices.
      shape: of the minibatches.
      model: the decoder.
      specs: of the learner's parameters: the model's, or lora.Adapted.
      learner: compiled; `step` donates the state.
      learning_rate: optimizer step -> learning rate.
      critic: compiled in the same way; None unless the recipe has one.
      reference: the initial trainable parameters, in precision.compute; None unless the loss or the
        reward needs them.
      attention: the kernel in use, for the log.
    """

    recipe: Recipe
    layout: Layout
    shape: MinibatchShape
    model: Model
    specs: Any
    learner: Learner
    learning_rate: Callable[[Any], Any]
    critic: ActorCritic | None
    reference: Params | None
    attention: str


def open_learning(config: Config, recipe: Recipe, *, layout: Layout) -> tuple[Learning, State]:
    """Loads the model and compiles policy and critic; returns them with their initial state.

    Raises:
      ValueError: for a model or a kernel that cannot be used; the message names the key.
    """
    policy = config.policy
    model, params, specs = load_trained(config, layout=layout)
    attention = _attention(config, model, layout=layout)
    optimizer = make_optimizer(
        config.optimizer, total_steps=config.optimizer_steps, specs=lora.trainable(specs)
    )
    pure = build_learner(
        config, model, objective=recipe.objective, optimizer=optimizer, layout=layout
    )
    shardings = state_shardings(
        config.optimizer, pure.init, params, layout=layout, specs=lora.declared(specs)
    )
    reference = None
    if Need.REFERENCE in recipe.objective.needs or config.reward.kl:
        trained = lora.trainable(params)
        reference = jax.jit(precision.cast, static_argnums=1)(trained, policy.compute)
    init = jax.jit(pure.init, donate_argnums=0, out_shardings=shardings)
    state, critic = State(init(params)), None
    if recipe.critic is not None:
        critic, critics_state = open_critic(
            config, recipe, learner=pure, model=model, shardings=shardings, layout=layout
        )
        state = state._replace(critic=critics_state)
    learner = Learner(
        init=pure.init,
        score=jax.jit(pure.score),
        shadow=jax.jit(pure.shadow),
        step=jax.jit(pure.step, donate_argnums=0, out_shardings=(shardings, None)),
    )
    learning = Learning(
        recipe=recipe,
        layout=layout,
        shape=minibatch_shape(config, layout=layout),
        model=model,
        specs=specs,
        learner=learner,
        learning_rate=optimizer.learning_rate,
        critic=critic,
        reference=reference,
        attention=attention,
    )
    return learning, state


def check_attention(learning: Learning, config: Config) -> None:
    """Checks that the devices of a run can compute the attention that another config asks for.

    Raises:
      ValueError: for a kernel that cannot be used; the message names the key.
    """
    _attention(config, learning.model, layout=learning.layout)


def _attention(config: Config, model: Model, *, layout: Layout) -> str:
    return attention_note(
        config.train.attention,
        config=model.config,
        layout=layout,
        policy=config.policy,
        length=config.row_length,
    )


def as_published(config: LoraConfig) -> Callable[[Any], Any]:
    """Returns the function from the learner's parameters to those that samplers compute with."""
    return lora.merge if config.publish == "merged" else lambda params: params


def build_learner(
    config: Config, model: Model, *, objective: Objective, optimizer: Optimizer, layout: Layout
) -> Learner:
    """Builds the learner of a training run, not compiled.

    Raises:
      ValueError: for routing replay of a dense model.
    """
    if config.train.replay_routing and model.config.experts is None:
        raise ValueError(
            f"train.replay_routing = true, but {config.model.path} ({model.config.model_type}) is "
            "a dense model without routing; leave it out"
        )
    specs = trained_specs(config.lora, model.specs)
    return make_learner(
        model,
        objective,
        optimizer=optimizer.transformation,
        precision=config.policy,
        rows_per_microbatch=config.microbatch_rows,
        temperature=config.sampling.temperature,
        param_shardings=layout.tree(specs) if layout.mesh.size > 1 else None,
        as_published=as_published(config.lora),
    )
