"""Every key of a supervised fine-tuning run."""

from collections.abc import Iterator
from typing import Self

from pydantic import PositiveInt, model_validator

from jaxrl.config_tables import (
    ModelConfig,
    OptimizerConfig,
    PromptConfig,
    Remat,
    RunConfig,
    Section,
)
from jaxrl.mesh_config import MeshConfig


class SFTDataConfig(PromptConfig):
    """Texts to learn."""

    path: str
    """A .jsonl or .parquet file, or the id of a data set on the Hugging Face hub (needs the `hub`
    extra)."""

    subset: str | None = None
    """Name of the data set's configuration on the hub."""

    split: str = "train"
    """Split of a hub data set."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages. It is not learnt."""

    completion_key: str = "completion"
    """Column with the text that answers the prompt; it is learnt, and that the text ends there."""

    text_key: str | None = None
    """Column with a whole text, learnt from its second token on; replaces prompt_key and
    completion_key."""


class SFTTrainConfig(Section):
    """The loop's sizes."""

    steps: PositiveInt = 1000
    """Number of optimizer steps."""

    batch_size: PositiveInt = 64
    """Sequences per optimizer step."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens, padding included, of one forward and backward pass on a data-parallel shard; rounded
    down to whole rows. It changes speed and memory and never the result."""

    row_length: PositiveInt = 1024
    """Tokens in a row of the learner's batch; longer sequences are left out and counted."""

    packing: bool = True
    """Put several short sequences into a row; otherwise one to a row."""

    remat: Remat = "matmuls"
    """What the backward pass computes again instead of keeping it: `none`; `matmuls` all but matrix
    products and attention, which costs next to nothing; `attention` all but attention; `layer` all
    of a layer, the least memory."""


class SFTConfig(RunConfig):
    """A supervised fine-tuning run."""

    run_dir: str = "runs/sft"
    """Directory of the tuned model (in `model`) and the metrics."""

    model: ModelConfig
    data: SFTDataConfig
    train: SFTTrainConfig = SFTTrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    mesh: MeshConfig = MeshConfig()

    @property
    def microbatch_rows(self) -> int:
        """Rows of one forward and backward pass, over all data-parallel shards."""
        per_shard = self.train.microbatch_tokens // self.train.row_length
        return per_shard * self.mesh.batch_shards

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        found = list(_contradictions(self))
        if found:
            raise ValueError("\n".join(found))
        return self


def _contradictions(c: SFTConfig) -> Iterator[str]:
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
