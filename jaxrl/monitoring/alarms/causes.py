"""What an alarm may mean, and what to change."""

from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """What is known of an alarm.

    Attributes:
      title: the alarm in a few words.
      causes: likely ones, the likeliest first.
      keys: of the config, to change, the first one first.
    """

    title: str
    causes: str
    keys: tuple[str, ...]


CAUSES: Mapping[str, Cause] = {
    "kl_spike": Cause(
        "KL spike",
        "a step too large, or a batch of rare answers that all earned much; nothing holds the "
        "policy near the reference",
        ("optimizer.learning_rate", "loss.kl", "optimizer.clip_norm", "train.updates_per_rollout"),
    ),
    "kl_with_reward": Cause(
        "KL runs away while the reward rises",
        "the reward has a loophole and the policy leaves the reference for it",
        ("reward.path", "loss.kl", "optimizer.learning_rate"),
    ),
    "gradient_spike": Cause(
        "gradient-norm spike",
        "a learning rate that is too high, no KL term in a long run, or 16-bit arithmetic",
        ("optimizer.learning_rate", "loss.kl", "optimizer.clip_norm", "precision"),
    ),
    "diversity": Cause(
        "diversity collapse",
        "answers no longer depend on the prompt: one pattern earns the reward everywhere",
        ("reward.path", "loss.kl", "loss.entropy", "sampling.temperature"),
    ),
    "identical": Cause(
        "identical answers",
        "the policy is certain of answers that are not the best; groups teach nothing",
        ("loss.entropy", "sampling.temperature", "optimizer.learning_rate", "loss.kl"),
    ),
    "repetition": Cause(
        "repetition",
        "a repeated pattern earns the reward, or the end of the answer is never reached",
        ("reward.path", "loss.kl", "sampling.stop", "reward.overlong_buffer"),
    ),
    "length_limit": Cause(
        "answers run to the limit",
        "length is paid for, by the reward or by the aggregation; or the limit is too low",
        ("reward.overlong_buffer", "sampling.max_tokens", "loss.aggregation", "loss.kl"),
    ),
    "length_zero": Cause(
        "answers shrink to nothing",
        "the reward prefers silence: a penalty that only an empty answer escapes",
        ("reward.path", "loss.kl", "optimizer.learning_rate"),
    ),
    "entropy": Cause(
        "entropy collapse",
        "the policy became certain before the task was solved: clipping that is tight above, too "
        "many updates of one rollout, a learning rate that is too high",
        ("loss.entropy", "loss.clip_high", "optimizer.learning_rate", "loss.kl"),
    ),
    "held_out": Cause(
        "reward and held-out score drift apart",
        "the training reward is gamed, or the prompts are learnt by heart",
        ("reward.path", "data.path", "loss.kl", "train.steps"),
    ),
    "zero_spread": Cause(
        "no group has any spread",
        "the prompts are too easy (the run is done) or too hard, or the reward says the same of "
        "every answer",
        ("data.path", "train.dynamic_sampling_rounds", "reward.path", "train.group_size"),
    ),
    "sequence_mismatch": Cause(
        "learner and sampler drift apart",
        "16-bit arithmetic of longer or less likely answers; samples that are too old; weights "
        "that did not reach the sampler",
        ("precision", "rollouts.max_staleness", "loss.correction"),
    ),
    "phantom": Cause(
        "phantom clipping",
        "learner and sampler compute in different dtypes, and the clip takes the difference for "
        "progress",
        ("precision", "loss.ratio", "loss.clip_high"),
    ),
    "not_finite": Cause(
        "no finite gradient",
        "a loss or a reward that is not a number, or 16-bit arithmetic that overflows; nothing is "
        "learnt as long as it lasts",
        ("loss.name", "reward.path", "precision", "model.path"),
    ),
}
