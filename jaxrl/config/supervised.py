"""What the configs of all runs that learn from given texts have in common."""

from collections.abc import Iterator
from typing import Self

from pydantic import PositiveInt, model_validator

from jaxrl.config.mesh import MeshConfig
from jaxrl.config.tables import (
    Attention,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    Remat,
    RunConfig,
    Section,
)


class SupervisedTrainConfig(Section):
    """The loop's sizes."""

    steps: PositiveInt = 1000
    """Number of optimizer steps."""

    batch_size: PositiveInt = 64
    """Rows of the data per optimizer step: texts, or pairs of answers."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens, padding included, of one forward and backward pass on a data-parallel shard; rounded
    down to whole rows. It changes speed and memory and never the result."""

    row_length: PositiveInt = 1024
    """Tokens in a row of the learner's batch; a text, or both texts of a pair, that does not fit
    into one is left out and counted."""

    packing: bool = True
    """Put several short texts or pairs into a row; otherwise one to a row."""

    remat: Remat = "matmuls"
    """What the backward pass computes again instead of keeping it: `none`; `matmuls` all but matrix
    products and attention, which costs next to nothing; `attention` all but attention; `layer` all
    of a layer, the least memory."""

    attention: Attention = "auto"
    """Its kernel: `xla` runs everywhere, `splash` on TPUs, `cudnn` on NVIDIA GPUs; `auto` takes the
    one of the devices where the model and the dtypes allow it, and the run says which."""


class SupervisedConfig(RunConfig):
    """Keys of every run that learns from given texts."""

    model: ModelConfig
    train: SupervisedTrainConfig = SupervisedTrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=200)

    @property
    def microbatch_rows(self) -> int:
        """Rows of one forward and backward pass, over all data-parallel shards."""
        per_shard = self.train.microbatch_tokens // self.train.row_length
        return per_shard * self.mesh.batch_shards

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        found = list(_contradictions(self))
        if found:
            raise ValueError("\n".join(found))
        return self


def _contradictions(c: SupervisedConfig) -> Iterator[str]:
    if c.train.microbatch_tokens < c.train.row_length:
        yield (
            f"train.microbatch_tokens = {c.train.microbatch_tokens} does not hold one row of "
            f"train.row_length = {c.train.row_length} tokens; raise it to a multiple of that"
        )
    if c.optimizer.warmup_steps >= c.train.steps:
        yield (
            f"optimizer.warmup_steps = {c.optimizer.warmup_steps} leaves nothing of the run's "
            f"{c.train.steps} optimizer steps (train.steps)"
        )
