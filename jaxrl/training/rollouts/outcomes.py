"""Outcomes of rollouts: rewards with length and KL penalties, the input of advantages.

The metric "reward" is the task's alone; the penalties have their own metrics.
"""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Advantages, Outcomes, log_ratios, overlong_penalty, with_log_ratios
from jaxrl.builders.task import ENVIRONMENT
from jaxrl.config.reward import RewardConfig
from jaxrl.config.training import Config
from jaxrl.core import Rollout, count_bucket
from jaxrl.losses import KLEstimator, k1, k2, k3
from jaxrl.training.timing import Numbers

LogProbs = Sequence[np.ndarray]
"""f32[C] for each rollout: log-probs of its completion tokens."""


def shaped_outcomes(
    config: Config,
    rollouts: Sequence[Rollout],
    *,
    weights: Mapping[str, float],
    logprobs: Callable[[], tuple[LogProbs, LogProbs]],
    greedy: Callable[[], np.ndarray],
    episodes: np.ndarray | None = None,
) -> tuple[Outcomes, Numbers]:
    """Adds the penalties of a config to the rewards, whose parts have `weights`.

    `logprobs` returns the log-probs of the learner and of the reference; it is called only for a KL
    penalty. `greedy` returns f64[N], the reward of the greedy completion of each prompt. `episodes`
    are those of `Outcomes`.

    Returns:
      (the outcomes, metrics of the penalties).
    """
    c, turns = config.reward, None
    if ENVIRONMENT in weights:
        turns = [list(r.episode.turns) if r.episode else [] for r in rollouts]
    rewards = np.array([r.reward for r in rollouts])
    components = np.array([r.components for r in rollouts]).reshape(len(rollouts), -1).T
    if episodes is not None:  # the reward of an episode counts once
        last = np.diff(episodes, append=-1) != 0
        rewards, components = np.where(last, rewards, 0.0), np.where(last, components, 0.0)
    masks, numbers = [r.action_mask for r in rollouts], Numbers()
    weights, named = dict(weights), dict(zip(weights, components, strict=False))
    if c.overlong_buffer:
        lengths = np.array([len(r.completion) for r in rollouts])
        longest = config.sampling.max_tokens
        overlong = overlong_penalty(lengths, longest=longest, buffer=c.overlong_buffer)
        rewards = rewards + overlong
        named, weights = named | {"overlong": overlong}, weights | {"overlong": 1.0}
        numbers["reward/overlong"] = float(overlong.mean())
    penalties = None
    if c.kl:
        learner, reference = logprobs()
        penalties = kl_penalties(
            learner=learner,
            reference=reference,
            masks=masks,
            coefficient=c.kl,
            estimator={"k1": k1, "k2": k2, "k3": k3}[c.kl_estimator],
        )
        paid = np.array([p.sum() for p in penalties])
        rewards = rewards - paid
        numbers["reward/kl"] = -float(paid.mean())
    return Outcomes(
        rewards=rewards,
        groups=np.array([r.group for r in rollouts]),
        action_masks=masks,
        components=named,
        weights=weights,
        penalties=penalties,
        turns=turns,
        greedy=greedy,
        episodes=episodes,
    ), numbers


def add_teacher(
    config: RewardConfig, rollouts: Sequence[Rollout], advantages: Advantages
) -> tuple[Advantages, Numbers]:
    """Adds the teacher's part to the advantages, if the rollouts have its log-probs.

    Returns:
      (the advantages, "kl/teacher": the reverse KL per token, in nats).
    """
    teacher = [r.teacher for r in rollouts if r.teacher is not None]
    if not teacher:
        return advantages, {}
    sampler, masks = [r.logprobs for r in rollouts], [r.action_mask for r in rollouts]
    ratios = log_ratios(teacher, sampler, masks)
    known = sum(
        int(np.count_nonzero(mask & ~np.isnan(t + s)))
        for mask, t, s in zip(masks, teacher, sampler, strict=True)
    )
    numbers = {"kl/teacher": -sum(float(one.sum()) for one in ratios) / max(1, known)}
    return with_log_ratios(advantages, ratios, weight=config.model_weight), numbers


def kl_penalties(
    *,
    learner: LogProbs,
    reference: LogProbs,
    masks: Sequence[np.ndarray],
    coefficient: float,
    estimator: KLEstimator,
) -> list[np.ndarray]:
    """Computes f64[C] for each rollout: coefficient x the estimated divergence of the learner from
    the reference at each token that the policy chose, 0 at the others."""
    if not masks:
        return []
    here, there, chosen = (np.concatenate(arrays) for arrays in (learner, reference, masks))
    # Padded to a size that recurs: each new size compiles again, and lengths differ every step.
    apart = np.zeros(count_bucket(len(chosen), multiple=1024), np.float32)
    apart[: len(chosen)] = there - here
    estimates = np.asarray(estimator(jnp.asarray(apart)), float)[: len(chosen)]
    ends = np.cumsum([len(mask) for mask in masks])[:-1]
    return np.split(np.where(chosen, coefficient * estimates, 0.0), ends)
