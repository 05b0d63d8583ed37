"""Advantages from a teacher: on-policy distillation."""

from collections.abc import Sequence

import numpy as np

from jaxrl.advantages.outcomes import Advantages

_LIMIT = 20.0  # nats; servers report -9999 for a probability of 0


def log_ratios(
    teacher: Sequence[np.ndarray], sampler: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Computes log teacher - log sampler at each token that the policy chose, f64[C] for each
    completion, clamped to +-20; 0 elsewhere, and where one of the two is NaN.

    Minus its mean over sampled tokens is the reverse KL, KL(policy || teacher).

    Example:
      >>> teacher, sampler = [np.array([-1.0, -2.0, -9999.0])], [np.array([-2.0, np.nan, -1.0])]
      >>> log_ratios(teacher, sampler, [np.ones(3, bool)])[0].tolist()
      [1.0, 0.0, -20.0]
    """
    return [
        np.where(mask, np.nan_to_num(np.clip(t - s.astype(float), -_LIMIT, _LIMIT)), 0.0)
        for t, s, mask in zip(teacher, sampler, masks, strict=True)
    ]


def with_log_ratios(
    advantages: Advantages, ratios: Sequence[np.ndarray], *, weight: float
) -> list[np.ndarray]:
    """Adds weight x log teacher / sampler to the advantages: f32[C] for each completion.

    Each token is credited with its own log-ratio alone, not with later ones: a discount of 0
    (Thinking Machines, "On-Policy Distillation", 2025).

    Example:
      >>> with_log_ratios(np.array([0.5]), [np.array([1.0, -2.0])], weight=0.1)[0].tolist()
      [0.6000000238418579, 0.30000001192092896]
    """
    return [
        np.asarray(advantage + weight * ratio, np.float32)
        for advantage, ratio in zip(advantages, ratios, strict=True)
    ]
