"""Builds the shape of a run's minibatches from its config."""

from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core.packing import MinibatchShape
from sharding.partition import Layout


def minibatch_shape(config: Config, *, layout: Layout) -> MinibatchShape:
    """Returns the shape of the minibatches of a run of reinforcement learning."""
    return MinibatchShape(
        row_length=config.row_length,
        rows_per_microbatch=config.microbatch_rows,
        max_rows=config.minibatch_completions,
        packed=config.train.packing,
        sharding=layout.batch(("batch", "length")),
    )


def supervised_shape(
    config: SupervisedConfig, *, layout: Layout, together: int = 1
) -> MinibatchShape:
    """Returns the shape of the batches of supervised training, in which `together` consecutive
    sequences share a row: 2 for pairs."""
    return MinibatchShape(
        row_length=config.train.row_length,
        rows_per_microbatch=config.microbatch_rows,
        max_rows=config.train.batch_size,
        packed=config.train.packing,
        together=together,
        sharding=layout.batch(("batch", "length")),
    )
