"""Builds what SFT, DPO and reward-model runs have in common."""

from typing import Any, NamedTuple

from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import Output, load_model
from jaxrl.builders.optimizer import Optimizer, make_optimizer
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.packing import MinibatchShape
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from sharding.partition import Layout


class Setup(NamedTuple):
    """The model of a supervised run and what its learner is made with.

    Attributes:
      layout: the learner's devices.
      model: the trained model.
      params: initial parameters.
      optimizer: of the run, with its learning rate.
      numerics: arguments of `make_learner`, `make_ranker` and `make_scores`: the dtype policy, the
        rows of a microbatch and the shardings.
    """

    layout: Layout
    model: Model
    params: Params
    optimizer: Optimizer
    numerics: dict[str, Any]


def set_up(config: SupervisedConfig, *, output: Output = "tokens") -> Setup:
    """Loads the model of a run; raises as `load_model`."""
    layout = make_layout(config.mesh, policy=config.policy)
    model, params = load_model(
        config.model.path,
        layout=layout,
        dtype=config.policy.params,
        remat=config.train.remat,
        attention=config.train.attention,
        output=output,
    )
    optimizer = make_optimizer(config.optimizer, total_steps=config.train.steps, specs=model.specs)
    numerics = {
        "precision": config.policy,
        "rows_per_microbatch": config.microbatch_rows,
        "param_shardings": layout.constraints(model.specs),
    }
    return Setup(layout, model, params, optimizer, numerics)


def supervised_shape(
    config: SupervisedConfig, *, layout: Layout, together: int = 1
) -> MinibatchShape:
    """Returns the shape of the batches, in which `together` consecutive sequences share a row: 2
    for pairs."""
    return MinibatchShape(
        row_length=config.train.row_length,
        rows_per_microbatch=config.microbatch_rows,
        max_rows=config.train.batch_size,
        packed=config.train.packing,
        together=together,
        sharding=layout.batch(("batch", "length")),
    )
