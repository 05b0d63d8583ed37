"""The table of a config that says what an answer is worth."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from jaxrl.config.tables import Numbers, Section, Texts


class RewardConfig(Section):
    """What an answer is worth."""

    path: Texts = ()
    """Reward functions, added up: a name in jaxrl.environments.rewards.builtin (`exact_match`,
    `numeric_match`, ...), `file.py:function` or `package.module:function`. The first one says what
    counts as right in evaluations."""

    weights: Numbers = ()
    """Factor of each function, in the same order; all 1 when empty. A function with the factor 0 is
    measured and not learnt."""

    model: str | None = None
    """Directory of a reward model (`jaxrl reward-model`), whose score of prompt and answer is added
    too. It reads the sampled token ids, so its tokenizer must be the policy's."""

    model_weight: float = 1.0
    """Factor of the reward model's score."""

    timeout: PositiveFloat = 60.0
    """Seconds that a reward function may take for an answer, or for all of them if it takes them at
    once. An answer whose reward fails or takes longer is not learnt from, and is counted."""

    kl: NonNegativeFloat = 0.0
    """What a nat of distance from the initial model takes from the reward, token by token; 0 needs
    no reference. The other place for it is loss.kl, and gdpo's only one."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How that distance is estimated."""

    overlong_buffer: NonNegativeInt = 0
    """The reward of an answer falls by up to 1 over the last so many of sampling.max_tokens; 0
    takes nothing."""
