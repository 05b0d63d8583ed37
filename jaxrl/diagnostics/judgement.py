"""Rewards of completions beside the scores of a judge."""

import math

import numpy as np


def judge_metrics(rewards: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Compares N completions' rewards with a judge's scores of them.

    Args:
      rewards: f64[N], finite.
      scores: f64[N]; NaN where there is none.
      groups: i64[N], the number of each completion's prompt.

    Returns:
      "failed", completions without a score; and of the others, if there are any: "score", "min" and
      "max", the mean score and its bounds; "reward", their mean reward; "agreement", as
      `ordered_alike` within prompts, or among all if no prompt has two completions.
    """
    known = ~np.isnan(scores)
    metrics = {"failed": float((~known).sum())}
    if not known.any():
        return metrics
    rewards, scores, groups = rewards[known], scores[known], groups[known]
    if len(np.unique(groups)) == len(groups):
        groups = np.zeros_like(groups)
    metrics |= {"score": float(scores.mean()), "reward": float(rewards.mean())}
    metrics |= {"min": float(scores.min()), "max": float(scores.max())}
    agreement = ordered_alike(rewards, scores, groups)
    return metrics if math.isnan(agreement) else metrics | {"agreement": agreement}


def ordered_alike(rewards: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
    """Returns the share of pairs within a group, of those with different rewards, that the scores
    order alike; equal scores count half.

    For rewards of 0 and 1 it is the area under the ROC curve of the scores, and in general (1 + D)
    / 2 with Somers' D (doi:10.2307/2090408).

    Args:
      rewards: f64[N].
      scores: f64[N].
      groups: i64[N].

    Returns:
      From 0 (reversed) over 1/2 (unrelated) to 1 (alike); NaN without such a pair.
    """
    better = (rewards[:, None] > rewards) & (groups[:, None] == groups)
    alike = (1 + np.sign(scores[:, None] - scores)) / 2
    return float(alike[better].mean()) if better.any() else math.nan
