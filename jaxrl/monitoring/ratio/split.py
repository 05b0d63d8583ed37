"""The importance ratio taken apart: what the policy moved, and what the arithmetic added.

log ratio = learner - sampler = alpha + beta, where alpha = shadow - sampler (the policy moved),
beta = learner - shadow (the numerics differ), and shadow is a forward pass of the learner's weights
in the sampler's dtypes. PPO's clip sees only the sum. A token is clipped by a phantom when its
clipped branch is taken at alpha + beta and would not be at alpha.
"""

from typing import NamedTuple

import numpy as np

from jaxrl.losses.ratios import LOG_RATIO_LIMIT

_DECILES = 10


class Tokens(NamedTuple):
    """Action tokens of a batch, in the order of its sequences, each f64[N].

    Attributes:
      learner, shadow, sampler: log-probs; NaN where the sampler reported none.
      advantages: of the tokens.
      sequences: i64[N], which sequence each belongs to.
    """

    learner: np.ndarray
    shadow: np.ndarray
    sampler: np.ndarray
    advantages: np.ndarray
    sequences: np.ndarray


def known_tokens(
    *,
    learner: np.ndarray,
    shadow: np.ndarray,
    sampler: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    segments: np.ndarray,
) -> Tokens:
    """The action tokens of rectangular arrays [B, T] whose sampler log-prob is known.

    Args:
      learner: log-probs.
      shadow: log-probs.
      sampler: log-probs, NaN where there is none.
      advantages: of the tokens.
      mask: bool, tokens that the policy chose.
      segments: i32, sequence within the row, 0 for padding.
    """
    chosen = mask & ~np.isnan(sampler)
    rows = np.arange(len(segments))[:, None] * (segments.max(initial=0) + 1) + segments
    wide = (x[chosen].astype(np.float64) for x in (learner, shadow, sampler, advantages))
    return Tokens(*wide, sequences=np.unique(rows[chosen], return_inverse=True)[1])


def split(tokens: Tokens, *, low: float, high: float) -> dict[str, float]:
    """The split of the log-ratio and everything else that is known of the mismatch.

    Args:
      tokens: at least one.
      low: PPO's clip takes ratios below 1 - low,
      high: and above 1 + high.

    Returns:
      "alpha", "beta": mean, "_std" and, of the magnitude, "_p99"; "beta_decile_0" .. "_9", mean
      |beta| of the tokens by the sampler's probability, from the rarest tenth; "beta_advantage",
      the correlation of beta with the advantage; "clipped", "clipped_low", "clipped_high", shares
      of tokens whose clipped branch is taken (A > 0 above 1 + high, A < 0 below 1 - low);
      "phantom", the share that is clipped at alpha + beta and not at alpha; "phantom_share", of the
      clipped tokens; "kl" E[-delta], "k3_kl", "chi2_token", "chi2_sequence", "ess", 1 / E[(w / mean
      w)^2]; "prob_diff_mean", "_p99", "_max"; "pearson" of the probabilities;
      "sequence_std", of the summed log-ratio, and "sequence_std_per_sqrt_token". A correlation of
      a constant is 0.
    """
    alpha, beta = tokens.shadow - tokens.sampler, tokens.learner - tokens.shadow
    delta = np.clip(alpha + beta, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    p, q = np.exp(tokens.learner), np.exp(tokens.sampler)
    up, down = tokens.advantages > 0, tokens.advantages < 0
    above, below = up & (delta > np.log1p(high)), down & (delta < np.log1p(-low))
    real = (up & (alpha > np.log1p(high))) | (down & (alpha < np.log1p(-low)))
    phantom = (above | below) & ~real
    w = np.exp(delta)
    lengths = np.bincount(tokens.sequences)
    sums = np.bincount(tokens.sequences, weights=delta)
    bounded = np.clip(sums, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clipped = float(np.mean(above | below))
    rare_first = np.array_split(np.abs(beta)[np.argsort(q, kind="stable")], _DECILES)
    return {
        **moments("alpha", alpha),
        **moments("beta", beta),
        **{f"beta_decile_{i}": float(x.mean()) for i, x in enumerate(rare_first) if x.size},
        "beta_advantage": _correlation(beta, tokens.advantages),
        "clipped": clipped,
        "clipped_low": float(np.mean(below)),
        "clipped_high": float(np.mean(above)),
        "phantom": float(np.mean(phantom)),
        "phantom_share": float(np.mean(phantom)) / clipped if clipped else 0.0,
        "kl": float(np.mean(-delta)),
        "k3_kl": float(np.mean(w - delta - 1)),
        "chi2_token": float(np.mean(w**2) - 1),
        "chi2_sequence": float(np.mean(np.exp(2 * bounded)) - 1),
        "ess": float(np.mean(w) ** 2 / np.mean(w**2)),
        "prob_diff_mean": float(np.abs(p - q).mean()),
        "prob_diff_p99": float(np.quantile(np.abs(p - q), 0.99)),
        "prob_diff_max": float(np.abs(p - q).max()),
        "pearson": _correlation(p, q),
        "sequence_std": float(sums.std()),
        "sequence_std_per_sqrt_token": float((sums / np.sqrt(lengths)).std()),
    }


def moments(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, "_std" and, of the magnitude, "_p99"; of values f[N]."""
    return {
        name: float(values.mean()),
        f"{name}_std": float(values.std()),
        f"{name}_p99": float(np.quantile(np.abs(values), 0.99)),
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    spread = x.std() * y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / spread) if spread else 0.0
