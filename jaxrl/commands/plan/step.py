"""The learner's step before compilation, as shapes."""

from typing import Any, NamedTuple

import jax

from jaxrl.builders.layout import make_layout, own_layout
from jaxrl.builders.learner import build_learner, step_minibatch, step_shape
from jaxrl.builders.model import ModelFiles, choose_kernel, find_models, make_decoder, trained_specs
from jaxrl.builders.optimizer import state_shardings
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.rows import choose_rows
from jaxrl.commands.plan.topology import Topology
from jaxrl.config.training import Config
from jaxrl.core import Minibatch
from jaxrl.learner import Learner, LearnerState
from jaxrl.losses import Recipe
from jaxrl.models import Kernel, Model, lora, position_chunks
from jaxrl.sharding import Layout, placed


class PlannedStep(NamedTuple):
    """Parts of a step before compilation."""

    config: Config  # with `train.row_length`
    recipe: Recipe
    models: ModelFiles  # only the config.json of each is read
    model: Model  # without weights
    specs: Any  # of the learner's parameters: the model's, or lora.Adapted
    layout: Layout
    apart: dict[str, Layout]  # meshes beside it, by their tables
    kernel: Kernel  # the attention implementation
    learner: Learner  # not compiled
    state: LearnerState  # shapes with shardings
    state_shardings: Any
    minibatch: Minibatch  # the largest one, shapes with shardings

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the largest minibatch."""
        return self.minibatch.batch.tokens.shape[0] // self.config.microbatch_rows

    @property
    def trips(self) -> tuple[int, ...]:
        """Iterations of the compiled step's loops that end by their data, from the outside in: over
        microbatches, if there are several, and over the head's chunks of a microbatch, if all its
        tokens are scored."""
        config, sizes = self.config, self.model.config
        chunks = position_chunks(
            config.microbatch_rows,
            config.row_length,
            vocab_size=sizes.vocab_size,
            division=self.model.rows,
        )
        return (self.microbatches, chunks) if self.microbatches > 1 else (chunks,)


def make_step(config: Config, topology: Topology) -> PlannedStep:
    """Builds the step of `jaxrl train`; raises as it does for an unusable model or mesh."""
    precision = config.precision
    layout = make_layout(
        config.mesh, precision=precision, devices=topology.devices, apart=config.devices_apart
    )
    models, recipe = find_models(config), make_recipe(config)
    sizes = models.policy.config
    config, align, _ = choose_rows(config, sizes, objective=recipe.objective, layout=layout)
    kernel = choose_kernel(config, sizes, layout=layout)
    model = make_decoder(sizes, layout=layout, remat=config.train.remat, attention=kernel)
    specs = trained_specs(config.lora, model.specs)
    learner, _ = build_learner(config, model, objective=recipe.objective, layout=layout)
    params = lora.abstract(specs, trained=precision.params, kept=precision.wire)
    shapes = jax.eval_shape(learner.init, params)
    shardings = state_shardings(config.optimizer, learner.init, params, layout=layout, specs=specs)
    return PlannedStep(
        config=config,
        recipe=recipe,
        models=models,
        model=model,
        specs=specs,
        layout=layout,
        apart={
            name: own_layout(config, name, shared=layout, devices=topology.devices)
            for name in config.own_meshes
        },
        kernel=kernel,
        learner=learner,
        state=placed(shapes, shardings),
        state_shardings=shardings,
        minibatch=step_minibatch(
            config, recipe, sizes=sizes, shape=step_shape(config, align, sizes=sizes, layout=layout)
        ),
    )
