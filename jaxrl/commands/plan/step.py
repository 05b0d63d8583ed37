"""The learner's step before compilation, as shapes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import huggingface
from jaxrl.builders.layout import make_layout
from jaxrl.builders.learner import build_learner, max_rows
from jaxrl.builders.model import choose_kernel, make_decoder, trained_specs
from jaxrl.builders.optimizer import state_shardings
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.rows import choose_rows
from jaxrl.commands.plan.topology import Topology
from jaxrl.config.training import Config
from jaxrl.core import Alignment, Minibatch, TokenBatch
from jaxrl.learner import Learner, LearnerState
from jaxrl.losses import Need, Recipe
from jaxrl.models import DecoderConfig, Kernel, Model, lora
from jaxrl.sharding import Layout, placed


class Step(NamedTuple):
    """Parts of the step."""

    config: Config  # with `train.row_length`
    recipe: Recipe
    model: Model  # without weights
    specs: Any  # of the learner's parameters: the model's, or lora.Adapted
    layout: Layout
    kernel: Kernel  # the attention implementation
    learner: Learner  # not compiled
    state: LearnerState  # shapes with shardings
    state_shardings: Any
    minibatch: Minibatch  # shapes with shardings


def make_step(config: Config, topology: Topology) -> Step:
    """Builds the step of `jaxrl train`; raises as it does for an unusable model or mesh."""
    precision = config.precision
    layout = make_layout(
        config.mesh, precision=precision, devices=topology.devices, reserved=config.sampler.devices
    )
    sizes, recipe = huggingface.load_config(config.model.path), make_recipe(config)
    config, align, _ = choose_rows(config, sizes, objective=recipe.objective, layout=layout)
    kernel = choose_kernel(config, sizes, layout=layout)
    model = make_decoder(sizes, layout=layout, remat=config.train.remat, attention=kernel)
    specs = trained_specs(config.lora, model.specs)
    learner, _ = build_learner(config, model, objective=recipe.objective, layout=layout)
    params = lora.abstract(specs, trained=precision.params, kept=precision.wire)
    shapes = jax.eval_shape(learner.init, params)
    shardings = state_shardings(config.optimizer, learner.init, params, layout=layout, specs=specs)
    return Step(
        config=config,
        recipe=recipe,
        model=model,
        specs=specs,
        layout=layout,
        kernel=kernel,
        learner=learner,
        state=placed(shapes, shardings),
        state_shardings=shardings,
        minibatch=_minibatch(config, sizes, layout=layout, recipe=recipe, align=align),
    )


def _minibatch(
    config: Config, sizes: DecoderConfig, *, layout: Layout, recipe: Recipe, align: Alignment
) -> Minibatch:
    """Builds the largest minibatch that training passes to the step."""
    count = -(-max_rows(config, align) // config.microbatch_rows)
    rows = layout.batch(("batch", "length"))
    shape = (count * config.microbatch_rows, config.row_length)

    def array(dtype: Any, *more: int) -> Any:
        return jax.ShapeDtypeStruct((*shape, *more), dtype, sharding=rows)

    experts = None
    if config.train.replay_routing and sizes.experts is not None:
        experts = array(jnp.int16, sizes.routed_layers, sizes.experts.per_token)
    whole, score = array(jnp.int32), array(jnp.float32)
    batch = TokenBatch(
        tokens=whole,
        segments=whole,
        positions=whole,
        action_mask=array(jnp.bool_),
        sampler_logprobs=score,
        advantages=score,
        rewards=score,
        coefficients={name: score for name in recipe.controllers} or None,
        experts=experts,
        seen_until=whole if align.shared else None,
    )
    needs, several = recipe.objective.needs, config.train.updates_per_rollout > 1
    used: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated)
    return Minibatch(
        batch=batch,
        microbatches=used,
        anchor=score if Need.ANCHOR in needs and several else None,
        reference=score if Need.REFERENCE in needs else None,
    )
