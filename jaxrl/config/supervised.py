"""Every key of a supervised fine-tuning run; reward-model and DPO runs share most of them."""

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from jaxrl.config.adapters import AdaptersConfig
from jaxrl.config.data import TextsConfig
from jaxrl.config.hosts import HostsConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.optimizer import OptimizerConfig
from jaxrl.config.section import Attention, Remat, RunDir, Section
from jaxrl.config.tables import CheckpointConfig, ModelConfig, RunConfig


class SupervisedTrainConfig(Section):
    """Batch sizes and the training loop."""

    steps: PositiveInt = 1000
    """Number of optimizer steps."""

    batch_size: PositiveInt = 64
    """Rows of the data per optimizer step: texts, or pairs of completions."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens, padding included, of one forward and backward pass on a data-parallel shard; rounded
    down to whole rows. It changes speed and memory, never the result."""

    row_length: PositiveInt = 1024
    """Tokens in a row of the learner's batch. Longer texts or pairs are dropped and counted."""

    packing: bool = True
    """Pack several short texts or pairs into a row instead of one per row."""

    remat: Remat = "matmuls"
    attention: Attention = "auto"


class SupervisedConfig(RunConfig):
    """Keys of every run that trains on given texts."""

    model: ModelConfig
    train: SupervisedTrainConfig = SupervisedTrainConfig()
    lora: AdaptersConfig = AdaptersConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=200)
    data: TextsConfig

    @property
    def row_length(self) -> int:
        """Tokens in a row of the learner's batch."""
        return self.train.row_length

    @property
    def microbatch_rows(self) -> int:
        """Rows of one forward and backward pass, over all data-parallel shards."""
        per_shard = self.train.microbatch_tokens // self.row_length
        return per_shard * self.mesh.batch_shards()

    def _contradictions(self) -> Iterator[str]:
        yield from self.optimizer.conflicts(self.precision, steps=self.train.steps)
        if self.precision.sums == "fixed":
            yield (
                f"precision = {self.precision.text!r}: sums=fixed makes log-probs equal to those "
                "of the embedded sampler, and a run on given texts has none; leave it out"
            )
        if self.train.microbatch_tokens < self.train.row_length:
            yield (
                f"train.microbatch_tokens = {self.train.microbatch_tokens} does not hold one row "
                f"of train.row_length = {self.train.row_length} tokens; raise it to a multiple of "
                "that"
            )


class SFTDataConfig(TextsConfig):
    """Texts to train on."""

    prompt_key: str | None = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages. It is not trained on.
    `none` if the column completion_key holds whole conversations."""

    completion_key: str = "completion"
    """Column with the completion to train on, and with the end of the text: a text, or a list with
    the assistant's message. With prompt_key = none every turn of the assistant is trained on."""

    text_key: str | None = None
    """Column with a whole text to train on from its second token; replaces the other two keys."""


class TextLossConfig(Section):
    """The loss of a completion token."""

    name: Literal["cross_entropy", "dft"] = "cross_entropy"
    """`cross_entropy`, -log p, or `dft`, -p log p without a gradient through the factor (dynamic
    fine-tuning, arXiv:2508.05629): tokens that the model finds unlikely teach it less."""


class SFTConfig(SupervisedConfig):
    """A supervised fine-tuning run."""

    run_dir: RunDir = "runs/sft"
    data: SFTDataConfig
    loss: TextLossConfig = TextLossConfig()
