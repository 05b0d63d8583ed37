"""Every key of the runs that learn from pairs of answers: a reward model, and DPO."""

from typing import Any, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.tables import OptimizerConfig, Plain, PromptConfig, Section


class PairDataConfig(PromptConfig):
    """Prompts with a chosen and a rejected answer to each."""

    path: str
    """A .jsonl or .parquet file, or the id of a data set on the Hugging Face hub (needs the `hub`
    extra)."""

    eval_path: str | None = None
    """Held-out pairs, in the same forms."""

    subset: str | None = None
    """Name of the data set's configuration on the hub."""

    split: str = "train"
    """Split of a hub data set to train on."""

    eval_split: str = "test"
    """Split of a hub data set to evaluate on."""

    eval_limit: PositiveInt | None = None
    """Evaluate on this many held-out pairs, the first ones of the file; all when absent."""

    prompt_key: str | None = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages. `none` where the
    answers' columns hold whole conversations, whose last message is the answer."""

    chosen_key: str = "chosen"
    """Column with the better answer: a text, or a list of messages that ends with it; messages
    before it must be those of the prompt."""

    rejected_key: str = "rejected"
    """Column with the worse answer, in the same forms."""


class RankedDataConfig(PairDataConfig):
    """Prompts with a chosen and a rejected answer to each, and by how much it is better."""

    margin_key: str | None = None
    """Column with the margin by which the chosen answer shall be worth more; no margin when
    absent."""


class PairEvalConfig(Section):
    """The share of the pairs of data.eval_path in which the chosen answer comes out ahead."""

    every: NonNegativeInt = 0
    """Evaluate after this many steps; 0 evaluates before the first and after the last only."""


class BradleyTerryConfig(Section):
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2."""

    centring: NonNegativeFloat = 0.0
    """Holds rewards around 0, which differences alone leave open; 0.01 is usual."""


class PairLossConfig(Section):
    """The loss; further keys of this table are its keyword arguments, such as beta."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain] = Field(init=False)

    name: str = "sigmoid"
    """`sigmoid` (DPO), `hinge`, `ipo` (log-ratios averaged over an answer, as in TRL) or
    `ipo_summed` (of whole answers, as in OpenRLHF); or `file.py:function`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments for the loss, to be checked against its signature."""
        return dict(self.__pydantic_extra__)


class _PairsConfig(SupervisedConfig):
    data: PairDataConfig
    eval: PairEvalConfig = PairEvalConfig()

    @model_validator(mode="after")
    def _has_held_out(self) -> Self:
        if self.data.eval_path is None and self.eval.every:
            raise ValueError(f"eval.every = {self.eval.every} needs data.eval_path")
        return self


class RewardModelConfig(_PairsConfig):
    """A run that trains a reward model."""

    run_dir: str = "runs/reward_model"
    """Directory of the reward model (in `model`), checkpoints and metrics; a run found there is
    continued."""

    data: RankedDataConfig
    loss: BradleyTerryConfig = BradleyTerryConfig()


class DPOConfig(_PairsConfig):
    """A run of direct preference optimisation."""

    run_dir: str = "runs/dpo"
    """Directory of the tuned model (in `model`), checkpoints and metrics; a run found there is
    continued."""

    loss: PairLossConfig = PairLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7)
