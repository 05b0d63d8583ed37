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
      rewards: f64[N, S]; a reward above 1/2 counts as right, NaN as no completion.
      k: from 1 to S.

    Returns:
      NaN if no prompt has k completions.
    """
    known = (~np.isnan(rewards)).sum(axis=1)
    right = (rewards > 0.5).sum(axis=1)
    shares = [
        1 - math.comb(n - c, k) / math.comb(n, k)
        for n, c in zip(known.tolist(), right.tolist(), strict=True)
        if n >= k
    ]
    return float(np.mean(shares)) if shares else math.nan


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
      rewards: f64[N, S]; NaN where there is none.

    Returns:
      NaN for fewer than two prompts with a reward.
    """
    known = rewards[~np.isnan(rewards).all(axis=1)]
    if len(known) < 2:
        return math.nan
    return float(1.96 * np.nanmean(known, axis=1).std(ddof=1) / math.sqrt(len(known)))
