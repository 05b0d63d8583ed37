"""Builds and compiles the policy of a run, its reference and its critic."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from optax import Schedule

from jaxrl.builders.apart import Apart, open_apart
from jaxrl.builders.critic import open_critic, place_critic
from jaxrl.builders.model import (
    ModelFiles,
    attention_note,
    check_precision,
    check_token_ids,
    load_trained,
    trained_specs,
)
from jaxrl.builders.optimizer import make_optimizer, state_shardings
from jaxrl.builders.reference import ScoreApart, place_reference
from jaxrl.builders.rows import choose_rows, trained_shape
from jaxrl.config.training import Config
from jaxrl.core import (
    Alignment,
    Minibatch,
    MinibatchShape,
    Rollout,
    abstract_minibatch,
    disagreement,
    jit,
    most_rows,
)
from jaxrl.diagnostics import make_drift
from jaxrl.learner import (
    ActorCritic,
    Learner,
    State,
    gated,
    make_learner,
    make_score,
    reporting_publish,
)
from jaxrl.losses import Need, Objective, Recipe
from jaxrl.models import DecoderConfig, Model, Params, lora
from jaxrl.sharding import Layout


class Learning(NamedTuple):
    """The compiled policy and critic of a run."""

    recipe: Recipe  # the loss and the advantages
    layout: Layout  # the learner's devices
    shape: MinibatchShape  # of the minibatches
    rows_note: str  # says how the shape was chosen, for the log
    model: Model  # the decoder
    specs: Any  # of the learner's parameters: the model's, or lora.Adapted
    learner: Learner  # compiled; `step` donates the state
    # `learner.score` at temperature 1: samplers report greedy tokens so.
    greedy_score: Callable[[Any, Minibatch], Any]
    learning_rate: Callable[[Any], Any]  # optimizer step -> learning rate
    # (params, minibatch) -> the drift of a sampler that computes differently, as a share of the
    # gradient; None if it computes alike.
    drift: Callable[[Any, Minibatch], Any] | None
    critic: ActorCritic | None  # compiled in the same way; None unless the recipe has one
    # The initial trainable parameters, as `lora.as_reference`; None unless a loss or reward needs
    # them on these devices.
    reference: Params | None
    # The reference on devices of its own or on a server.
    reference_apart: ScoreApart | None = None
    # The other devices of a run, by the model on them: "critic", "reference".
    apart: Mapping[str, Apart] = {}

    def weights_of(self, score: str, params: Any) -> Any:
        """Returns the parameters of a score: the initial ones for "reference", else `params`."""
        if score != Need.REFERENCE:
            return params
        assert self.reference is not None, "the config needs one"
        return lora.with_trainable(params, self.reference)

    def scores(
        self, score: str, params: Any, *, rollouts: Sequence[Rollout], minibatch: Minibatch
    ) -> jax.Array:
        """Computes the log-probs f32[N, T] of the minibatch of these rollouts, of the reference or
        of the policy with `params`."""
        if score == Need.REFERENCE and self.reference_apart is not None:
            return self.reference_apart(rollouts, minibatch)
        return self.learner.score(self.weights_of(score, params), minibatch)

    def check_attention(self, config: Config) -> str:
        """Returns the `attention_note` of a config on these devices."""
        return attention_note(config, self.model, layout=self.layout)


def open_learning(
    config: Config, recipe: Recipe, *, models: ModelFiles, layout: Layout
) -> tuple[Learning, State]:
    """Loads the model and compiles policy and critic; returns them with their initial state. Raises
    as `load_trained`, `check_token_ids`, `attention_note` and `build_learner`."""
    if recipe.critic is not None and (path := config.critic.path) is not None:
        check_token_ids(models.critic, models.policy, key=f"critic.path = {path!r}")
    model, params, specs = load_trained(config, models.policy, layout=layout)
    config, align, rows_note = choose_rows(
        config, model.config, objective=recipe.objective, layout=layout
    )
    attention_note(config, model, layout=layout)  # before compiling
    pure, learning_rate = build_learner(config, model, objective=recipe.objective, layout=layout)
    shardings = state_shardings(config.optimizer, pure.init, params, layout=layout, specs=specs)
    reference = reference_apart = None
    apart = _open_apart(config, recipe, layout=layout)
    if "reference" in apart:
        reference_apart = place_reference(
            config, model, params=params, specs=specs, apart=apart["reference"]
        )
    elif holds_reference(config, recipe):
        reference = jit(lora.as_reference, static_argnums=1)(params, config.precision)
    init = jit(pure.init, donate_argnums=0, out_shardings=shardings)
    compiled = functools.partial(jit, sums=config.precision.sums)
    state, critic = State(init(params)), None
    score = greedy_score = compiled(pure.score)
    learner = pure._replace(
        score=score,
        shadow_scores=compiled(pure.shadow_scores),
        energies=compiled(pure.energies),
        step=compiled(pure.step, donate_argnums=0, out_shardings=(shardings, None)),
    )
    if recipe.critic is not None:
        given: dict[str, Any] = {"checkpoint": models.critic}
        if "critic" in apart:
            given |= {"learner": learner, "apart": apart["critic"]}
            critic, critics_state = place_critic(config, recipe, **given)
        else:
            given |= {"learner": pure, "model": model, "shardings": shardings, "layout": layout}
            critic, critics_state = open_critic(config, recipe, **given)
        state = state._replace(critic=critics_state)
    if model.temperature != config.sampling.temperature:
        greedy_score = compiled(
            make_score(model, precision=config.precision, param_shardings=layout.constraints(specs))
        )
    learning = Learning(
        recipe=recipe,
        layout=layout,
        shape=step_shape(config, align, sizes=model.config, layout=layout),
        rows_note=rows_note,
        model=model,
        specs=specs,
        learner=learner,
        greedy_score=greedy_score,
        learning_rate=learning_rate,
        drift=_drift(config, model, shardings=layout.constraints(specs)),
        critic=critic,
        reference=reference,
        reference_apart=reference_apart,
        apart=apart,
    )
    return learning, state


def _open_apart(config: Config, recipe: Recipe, *, layout: Layout) -> dict[str, Apart]:
    """Opens the devices of critic and reference that have a mesh of their own."""
    wanted = {"critic": recipe.critic is not None, "reference": needs_reference(config, recipe)}
    if not wanted["reference"] and (url := config.reference.server) is not None:
        raise ValueError(
            f"reference.server = {url!r}, but loss and reward use no reference; set loss.kl or "
            "reward.kl, or leave it out"
        )
    found = {}
    for name, used in wanted.items():
        one = open_apart(config, f"{name}_mesh", policy=layout)
        if one is not None and not used:
            raise ValueError(f"{name}_mesh, but loss and reward use no {name}; leave it out")
        if one is not None:
            found[name] = one
    return found


def _drift(
    config: Config, model: Model, *, shardings: Any
) -> Callable[[Any, Minibatch], Any] | None:
    if disagreement(config.precision) is None:
        return None
    made = make_drift(
        model._replace(temperature=config.sampling.temperature),
        precision=config.precision,
        param_shardings=shardings,
        as_published=_as_published(config),
    )
    return jit(made)


def _as_published(config: Config) -> Callable[[Any], Any]:
    """Returns what makes the weights that samplers use of the learner's."""
    return lora.merge if config.lora.publish == "merged" else lambda params: params


def needs_reference(config: Config, recipe: Recipe) -> bool:
    """Tells if the loss or the reward compares with the initial model."""
    return Need.REFERENCE in recipe.objective.needs or config.reward.kl > 0


def holds_reference(config: Config, recipe: Recipe) -> bool:
    """Tells if the run reads the weights of the reference, because no server has them."""
    return needs_reference(config, recipe) and config.reference.server is None


def step_shape(
    config: Config, align: Alignment, *, sizes: DecoderConfig, layout: Layout
) -> MinibatchShape:
    """Returns the shape of the minibatches of a step."""
    options: Any = {"max_rows": max_rows(config, align), "packed": config.train.packing}
    return trained_shape(config, layout, sizes=sizes, align=align, **options)


def step_minibatch(
    config: Config, recipe: Recipe, *, sizes: DecoderConfig, shape: MinibatchShape
) -> Minibatch:
    """Describes the minibatches that training passes to the step."""
    return abstract_minibatch(
        shape,
        critic=recipe.critic is not None,
        scores=given_scores(recipe, updates=config.train.updates_per_rollout),
        coefficients=recipe.controllers,
        experts=recorded_experts(config, sizes),
        kept=config.sampling.truncated,
    )


def given_scores(recipe: Recipe, *, updates: int) -> list[str]:
    """Names the scores computed before an update: those that the loss needs and the update does not
    change. With one update per rollout batch, the anchor is the learner itself."""
    given = {Need.REFERENCE, Need.ANCHOR} if updates > 1 else {Need.REFERENCE}
    return sorted(need.value for need in given & recipe.objective.needs)


def anchor_note(recipe: Recipe, *, updates: int) -> str | None:
    """Says that the anchor's forward pass is left out, if the loss compares with the anchor."""
    if updates > 1 or Need.ANCHOR not in recipe.objective.needs:
        return None
    return (
        "train.updates_per_rollout = 1: the anchor is the learner itself, so its forward pass is "
        "skipped and a ratio over it is 1"
    )


def recorded_experts(config: Config, sizes: DecoderConfig) -> tuple[int, int] | None:
    """Returns (routed layers, experts per token) if minibatches record experts."""
    if not config.train.replay_routing or sizes.experts is None:
        return None
    return sizes.routed_layers, sizes.experts.per_token


def max_rows(config: Config, align: Alignment) -> int:
    """Bounds the rows of a minibatch."""
    completions = config.minibatch_completions
    if not align.shared:
        return completions
    return most_rows(completions, longest=config.longest_sequence, row_length=config.row_length)


def build_learner(
    config: Config, model: Model, *, objective: Objective, layout: Layout
) -> tuple[Learner, Schedule]:
    """Builds the learner of a training run, not compiled, and its learning rate.

    Raises:
      ValueError: for routing replay of a dense model, or a dtype policy that the model cannot be
        computed with, also that of a rollback.
    """
    check_precision("precision", config.precision, model.config)
    if config.alarms.precision is not None:
        check_precision("alarms.precision", config.alarms.precision, model.config)
    if config.train.replay_routing and model.config.experts is None:
        raise ValueError(
            f"train.replay_routing = true, but {config.model.path} ({model.config.model_type}) is "
            "a dense model without routing; leave it out"
        )
    specs = trained_specs(config.lora, model.specs)
    optimizer, learning_rate = make_optimizer(
        config.optimizer, total_steps=config.policy_steps, specs=specs
    )
    learner = make_learner(
        model._replace(temperature=config.sampling.temperature),
        objective,
        optimizer=optimizer,
        as_published=_as_published(config),
        precision=config.precision,
        param_shardings=layout.constraints(specs),
    )
    if config.train.gate:
        learner = learner._replace(step=gated(learner))
    if not config.lora.rank or config.lora.publish == "adapters":
        step = reporting_publish(
            learner.step, params_of=lambda state: state.params, precision=config.precision
        )
        learner = learner._replace(step=step)
    return learner, learning_rate
