"""Builds what SFT, DPO and reward-model runs have in common."""

from typing import Any, NamedTuple

from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_trained
from jaxrl.builders.optimizer import Optimizer, make_optimizer
from jaxrl.config.preference import RewardModelConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.hosts import Hosts
from jaxrl.core.packing import MinibatchShape
from jaxrl.models import lora
from jaxrl.models.decoder import Model
from sharding.partition import Layout


class Setup(NamedTuple):
    """The model of a supervised run and what its learner is made with."""

    hosts: Hosts  # the processes of the run
    layout: Layout  # the learner's devices
    model: Model  # the trained model
    params: Any  # initial parameters, or `lora.Adapted`
    specs: Any  # of the parameters: the model's, or `lora.Adapted`
    optimizer: Optimizer  # of the run, with its learning rate
    # Arguments of `make_learner`, `make_ranker` and `make_scores`: the dtype policy, the rows of a
    # microbatch and the shardings.
    numerics: dict[str, Any]


def set_up(config: SupervisedConfig) -> Setup:
    """Loads the model of a run, which is a scorer for a reward model; raises as `load_trained`."""
    layout = make_layout(config.mesh, policy=config.policy)
    output = "scores" if isinstance(config, RewardModelConfig) else "tokens"
    model, params, specs = load_trained(config, layout=layout, output=output)
    optimizer = make_optimizer(
        config.optimizer, total_steps=config.train.steps, specs=lora.trainable(specs)
    )
    numerics = {
        "precision": config.policy,
        "rows_per_microbatch": config.microbatch_rows,
        "param_shardings": layout.constraints(specs),
    }
    return Setup(Hosts(), layout, model, params, specs, optimizer, numerics)


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
