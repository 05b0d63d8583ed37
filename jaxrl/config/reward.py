"""The `[reward]` table of a config."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from jaxrl.config.section import Numbers, Seconds, Section, Texts, is_http_address


class RewardConfig(Section):
    """The reward of a completion."""

    path: Texts = ()
    """Reward functions, summed: a name in jaxrl.environments.rewards.builtin (`exact_match`,
    `numeric_match`, ...), `file.py:function` or `package.module:function`. The first one decides
    what counts as correct in evaluations."""

    weights: Numbers = ()
    """One weight for each function, then one for reward.model if set; all 1 if empty. A part with
    weight 0 is logged but not trained on."""

    model: str | None = None
    """A reward model (`jaxrl reward-model`), whose score is added to the reward. Or a teacher, a
    language model: the advantage of each token then gains weight x log(teacher / sampler).
    Either is a directory, or the address of a vLLM server, such as http://127.0.0.1:8001. Both read
    token ids, so their tokenizer must be the policy's."""

    timeout: Seconds = 60.0
    """Time limit in seconds of a reward function for one completion, or for all if it takes a
    batch. A completion whose reward fails or takes longer is counted and excluded from training."""

    kl: NonNegativeFloat = 0.0
    """Coefficient of the per-token KL penalty in the reward, against the initial model; 0 needs no
    reference model. The alternative is loss.kl, the only one that works with gdpo."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that penalty, from d = log(reference / learner): `k1` (-d), `k2` (d^2 / 2) or
    `k3` (e^d - d - 1). Only k1 has the gradient of the KL divergence as a reward."""

    overlong_buffer: NonNegativeInt = 0
    """DAPO's soft overlong punishment: over the last N tokens before sampling.max_tokens the reward
    falls linearly by up to 1; 0 disables it."""

    @property
    def function_weights(self) -> tuple[float, ...]:
        """One weight for each function of `path`."""
        return self.weights[: len(self.path)]

    @property
    def model_weight(self) -> float:
        """Weight of the reward model or the teacher."""
        return self.weights[-1] if self.weights else 1.0

    @property
    def model_url(self) -> bool:
        """True if `model` is the address of a server, not a directory."""
        return self.model is not None and is_http_address(self.model)

    @property
    def nothing_counts(self) -> bool:
        """True if all weights are 0 and nothing else changes the reward."""
        shaped = self.kl or self.overlong_buffer
        return bool(self.weights) and not any(self.weights) and not shaped

    def _contradictions(self) -> Iterator[str]:
        parts = len(self.path) + (self.model is not None)
        if self.weights and len(self.weights) != parts:
            model = " and reward.model" if self.model is not None else ""
            yield (
                f"reward.weights has {len(self.weights)} numbers for {len(self.path)} functions in "
                f"reward.path{model}; give one for each, or leave reward.weights out"
            )
