"""Every key of the runs that train on preference pairs: reward models and DPO."""

from collections.abc import Iterator

from pydantic import NonNegativeFloat

from jaxrl.config.data import HeldOutConfig
from jaxrl.config.optimizer import OptimizerConfig
from jaxrl.config.section import OpenSection, RunDir, Section
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.tables import EvalConfig


class PairDataConfig(HeldOutConfig):
    """Prompts with a chosen and a rejected completion each."""

    prompt_key: str | None = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages. `none` if the
    completions' columns hold whole conversations that end with the completion."""

    chosen_key: str = "chosen"
    """Column with the better completion: a text, or messages that end with it. Messages before it
    must be the prompt's."""

    rejected_key: str = "rejected"
    """Column with the worse completion, in the same forms."""


class RankedDataConfig(PairDataConfig):
    """Prompts with a chosen and a rejected completion each, and the margin between them."""

    margin_key: str | None = None
    """Column with the margin between the two rewards; no margin if absent."""


class PairEvalConfig(EvalConfig):
    """Accuracy on data.eval_path: the share of pairs in which the chosen completion wins."""


class BradleyTerryConfig(Section):
    """-log sigmoid(chosen - rejected - margin) + center_rewards (chosen + rejected)^2."""

    center_rewards: NonNegativeFloat = 0.0
    """Coefficient that keeps rewards near 0, since differences leave their mean undetermined; 0.01
    is usual (TRL: center_rewards_coefficient)."""


class PairLossConfig(OpenSection):
    """The loss. Further keys of this table are its keyword arguments, such as beta."""

    name: str = "sigmoid"
    """`sigmoid` (DPO), `sigmoid_averaged` (log-ratios averaged over a completion), `rpo` (with the
    likelihood of the chosen completion), `length_desensitized` (LD-DPO), `hinge`, `ipo` (averaged
    over a completion, as in TRL), `ipo_summed` (summed, as in OpenRLHF), `robust`, `exo`,
    `discopop`, `forward_kl`, `js_divergence` and `alpha_divergence` (f-DPO), `nca`, `bco`,
    `sppo_hard`, `apo_zero`, `apo_down`, `aot`, `aot_unpaired`, or `file.py:function`."""


class _PairsConfig(SupervisedConfig):
    data: PairDataConfig
    eval: PairEvalConfig = PairEvalConfig()

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.data.eval_path is None and self.eval.every:
            yield f"eval.every = {self.eval.every} needs data.eval_path"


class RewardModelConfig(_PairsConfig):
    """A run that trains a reward model."""

    run_dir: RunDir = "runs/reward_model"
    data: RankedDataConfig
    loss: BradleyTerryConfig = BradleyTerryConfig()


class DPOConfig(_PairsConfig):
    """A run of direct preference optimisation."""

    run_dir: RunDir = "runs/dpo"
    loss: PairLossConfig = PairLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7)
