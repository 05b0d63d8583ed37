"""Builds the common parts of SFT, DPO and reward-model runs."""

from typing import Any, NamedTuple

from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_trained
from jaxrl.builders.optimizer import Optimizer, make_optimizer
from jaxrl.builders.rows import trained_shape
from jaxrl.config.preference import RewardModelConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core import Hosts, MinibatchShape
from jaxrl.huggingface import Checkpoint
from jaxrl.models import DecoderConfig, Model
from jaxrl.sharding import Layout


class Setup(NamedTuple):
    """The model of a supervised run, and the arguments of its learner."""

    hosts: Hosts  # the processes of the run
    layout: Layout  # the learner's devices
    checkpoint: Checkpoint  # that the model starts from
    model: Model  # the trained model
    params: Any  # initial parameters, or `lora.Adapted`
    specs: Any  # of the parameters: the model's, or `lora.Adapted`
    optimizer: Optimizer  # of the run, with its learning rate
    param_shardings: Any  # that the learner's parameters keep; None on a single device


def set_up(config: SupervisedConfig, checkpoint: Checkpoint) -> Setup:
    """Loads the model of a run, which is a scorer for a reward model; raises as `load_trained`."""
    layout = make_layout(config.mesh, precision=config.precision)
    output = "scores" if isinstance(config, RewardModelConfig) else "tokens"
    model, params, specs = load_trained(config, checkpoint, layout=layout, output=output)
    optimizer = make_optimizer(config.optimizer, total_steps=config.train.steps, specs=specs)
    shardings = layout.constraints(specs)
    return Setup(Hosts(), layout, checkpoint, model, params, specs, optimizer, shardings)


def supervised_shape(
    config: SupervisedConfig, *, sizes: DecoderConfig, layout: Layout, together: int = 1
) -> MinibatchShape:
    """Returns the shape of the batches, with `together` consecutive sequences in a row."""
    return trained_shape(
        config,
        layout,
        sizes=sizes,
        max_rows=config.train.batch_size,
        packed=config.train.packing,
        together=together,
    )
