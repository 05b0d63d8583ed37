"""Accuracy over several completions per prompt: pass@k, majority vote, confidence intervals."""

import collections
import math
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(rewards: np.ndarray, k: int) -> float:
    """Estimates the probability that at least one of k completions of a prompt is right, without
    bias (arXiv:2107.03374, equation 1): the mean over prompts of 1 - C(n - c, k) / C(n, k), where c
    of a prompt's n completions are right.

    Args:
      rewards: f64[N, S]; a reward above 1/2 counts as right; NaN, a reward that failed, as wrong.
      k: from 1 to S.
    """
    n, right = rewards.shape[1], (rewards > 0.5).sum(axis=1)
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in right.tolist()]))


def majority(answers: Sequence[Sequence[Hashable]], rewards: np.ndarray) -> float:
    """Returns the share of prompts whose most frequent answer is right (self-consistency,
    arXiv:2203.11171). Answers that are equally frequent share the prompt.

    Args:
      answers: of S completions of each of N prompts; None votes for nothing.
      rewards: f64[N, S]; above 1/2 is right.
    """
    shares = []
    for given, values in zip(answers, rewards, strict=True):
        votes = collections.Counter(answer for answer in given if answer is not None)
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        right = [float(values[list(given).index(answer)] > 0.5) for answer in winners]
        shares.append(float(np.mean(right)) if right else 0.0)
    return float(np.mean(shares))


def half_interval(rewards: np.ndarray) -> float:
    """Returns half the width of the 95 % confidence interval of the mean reward: 1.96 standard
    errors over prompts, whose completions depend on each other (arXiv:2411.00640).

    Args:
      rewards: f64[N, S]; NaN, a reward that failed, counts as 0.

    Returns:
      NaN for fewer than two prompts.
    """
    if len(rewards) < 2:
        return math.nan
    means = np.nan_to_num(rewards).mean(axis=1)
    return float(1.96 * means.std(ddof=1) / math.sqrt(len(means)))


def mean_and_interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Returns the mean over all values of N clusters, and half the width of its 95 % confidence
    interval: 1.96 standard errors over clusters, whose values depend on each other
    (arXiv:2411.00640).

    Args:
      sums: f64[N], the sum of each cluster's values, such as those of a completion's tokens.
      counts: i64[N], their number; at least one is above 0.

    Returns:
      (mean, half the width); the latter is NaN for fewer than two clusters.
    """
    mean, clusters = float(sums.sum() / counts.sum()), len(sums)
    if clusters < 2:
        return mean, math.nan
    variance = ((sums - mean * counts) ** 2).sum() * clusters / (clusters - 1)
    return mean, float(1.96 * math.sqrt(variance) / counts.sum())
