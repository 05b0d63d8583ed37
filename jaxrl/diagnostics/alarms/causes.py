"""Likely causes of each alarm, and the config keys to change."""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """The explanation of an alarm."""

    title: str  # the alarm in a few words
    causes: str  # likely ones, the likeliest first
    keys: tuple[str, ...]  # of the config, in the order in which to try them


CAUSES: Mapping[str, Cause] = {
    "kl_spike": Cause(
        "KL spike or falling reward",
        "a step that is too large, or a batch of rare completions with high rewards; nothing holds "
        "the policy near the reference",
        ("optimizer.learning_rate", "loss.kl", "optimizer.clip_norm", "train.updates_per_rollout"),
    ),
    "kl_with_reward": Cause(
        "KL grows fast while the reward rises",
        "the policy exploits a loophole in the reward, far from the reference",
        ("reward.path", "loss.kl", "optimizer.learning_rate"),
    ),
    "gradient_spike": Cause(
        "gradient-norm spike",
        "a learning rate that is too high, a long run without a KL term, or 16-bit arithmetic",
        ("optimizer.learning_rate", "loss.kl", "optimizer.clip_norm", "precision"),
    ),
    "diversity": Cause(
        "diversity collapse",
        "completions no longer depend on the prompt: one pattern earns the reward for all of them",
        ("reward.path", "loss.kl", "loss.entropy", "sampling.temperature"),
    ),
    "identical": Cause(
        "identical completions",
        "the policy is certain of completions that are not the best; groups have nothing to teach",
        ("loss.entropy", "sampling.temperature", "optimizer.learning_rate", "loss.kl"),
    ),
    "repetition": Cause(
        "repetition",
        "a repeated pattern earns the reward, or completions do not end",
        ("reward.path", "loss.kl", "sampling.stop", "reward.overlong_buffer"),
    ),
    "length_limit": Cause(
        "completions reach the length limit",
        "the reward or the aggregation favours length, or the limit is too low",
        ("reward.overlong_buffer", "sampling.max_tokens", "loss.aggregation", "loss.kl"),
    ),
    "length_zero": Cause(
        "completions shrink to nothing",
        "the reward favours silence: only an empty completion escapes a penalty",
        ("reward.path", "loss.kl", "optimizer.learning_rate"),
    ),
    "entropy": Cause(
        "entropy collapse",
        "the policy became certain before it solved the task: a tight upper clip, too many updates "
        "per rollout, or a learning rate that is too high",
        ("loss.entropy", "loss.clip_high", "optimizer.learning_rate", "loss.kl"),
    ),
    "held_out": Cause(
        "reward and held-out accuracy diverge",
        "the policy exploits the training reward or memorizes the prompts",
        ("reward.path", "data.path", "loss.kl", "train.steps"),
    ),
    "zero_variance": Cause(
        "no group has reward variance",
        "the prompts are too easy (the run is done) or too hard, or the reward is constant",
        ("data.path", "train.dynamic_sampling_rounds", "reward.path", "train.group_size"),
    ),
    "sequence_mismatch": Cause(
        "learner and sampler diverge",
        "16-bit arithmetic on longer or less likely completions, stale samples, or weights that "
        "did not reach the sampler; if probe/shape_noise_std is near probe/beta_std, the shapes of "
        "arrays alone, which sums=fixed in precision removes",
        ("precision", "rollouts.max_staleness", "loss.correction"),
    ),
    "phantom": Cause(
        "phantom clipping",
        "learner and sampler compute in different dtypes, and the clip mistakes the difference for "
        "policy movement",
        ("precision", "loss.ratio", "loss.clip_high"),
    ),
    "not_finite": Cause(
        "no finite gradient",
        "a loss or reward that is not a number, or 16-bit overflow; the policy learns nothing "
        "meanwhile",
        ("loss.name", "reward.path", "precision", "model.path"),
    ),
}


def usual_learning_rates(parameters: int, *, adapters: bool) -> tuple[float, float]:
    """Returns the lowest and the highest usual learning rate of AdamW for a model of that size.

    The middle is 1e-6 from a billion parameters up, as published recipes have it (DAPO and Dr. GRPO
    for 1.5 to 32 billion). It rises with the inverse square root of the size, to 1e-4 for the 10^5
    of the quickstart. Adapters take ten times as much (Schulman et al., LoRA Without Regret, 2025).
    """
    middle = max(1e-6, 1e-4 * math.sqrt(1e5 / parameters)) * (10 if adapters else 1)
    return middle / 3, middle * 3
