"""The alpha/beta split of the log importance ratio: policy movement and arithmetic.

log ratio = learner - sampler = alpha + beta. alpha = shadow - sampler is the movement of the policy
and beta = learner - shadow the difference in arithmetic; the shadow is a forward pass of the
learner's weights in the sampler's dtypes. PPO's clip sees only the sum. A clip is a phantom if the
clipped branch is taken at alpha + beta and would not be at alpha.
"""

from typing import NamedTuple

import numpy as np

from jaxrl.losses.ratios import LOG_RATIO_LIMIT

_DECILES = 10


class ActionTokens(NamedTuple):
    """Action tokens of a batch, in the order of its sequences; the first three are log-probs."""

    learner: np.ndarray  # f64[N]
    shadow: np.ndarray  # f64[N]
    sampler: np.ndarray  # f64[N], NaN where the sampler reported none
    advantages: np.ndarray  # f64[N]
    sequences: np.ndarray  # i64[N], index of the token's sequence


def known_tokens(
    *,
    learner: np.ndarray,
    shadow: np.ndarray,
    sampler: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    segments: np.ndarray,
) -> ActionTokens:
    """Selects the action tokens with a sampler log-prob from rectangular arrays [B, T].

    `mask` is True for action tokens; `segments` numbers the sequences of a row, 0 is padding. The
    others are as in `ActionTokens`.
    """
    chosen = mask & ~np.isnan(sampler)
    rows = np.arange(len(segments))[:, None] * (segments.max(initial=0) + 1) + segments
    wide = (x[chosen].astype(np.float64) for x in (learner, shadow, sampler, advantages))
    return ActionTokens(*wide, sequences=np.unique(rows[chosen], return_inverse=True)[1])


def split_log_ratio(tokens: ActionTokens, *, low: float, high: float) -> dict[str, float]:
    """Computes the split of the log-ratio of at least one token, and the mismatch's other metrics;
    PPO clips ratios below 1 - low and above 1 + high.

    Returns:
      With delta the log-ratio, w = exp delta and A the advantage:
      "alpha", "beta": `moments`, in nats; "beta_decile_0" to "_9": mean |beta| by the sampler's
      probability, the rarest tenth of the tokens first; "beta_advantage": correlation of beta and
      A; "clipped", "clipped_low", "clipped_high": shares of tokens whose clipped branch is taken
      (A < 0 below 1 - low, A > 0 above 1 + high); "phantom": share clipped at alpha + beta but not
      at alpha; "phantom_share": the same of the clipped tokens; "kl": E[-delta]; "k3_kl":
      E[w - delta - 1]; "chi2_token", "chi2_sequence": E[w^2] - 1; "ess": E[w]^2 / E[w^2];
      "prob_diff_mean", "_p99", "_max": difference of the probabilities; "pearson": their
      correlation; "sequence_std": of the summed delta; "sequence_std_per_sqrt_token". The
      correlation with a constant is 0.
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
    """Computes the mean NAME, NAME_std and, of the magnitude, NAME_p99 of values f[N]."""
    return {
        name: float(values.mean()),
        f"{name}_std": float(values.std()),
        f"{name}_p99": float(np.quantile(np.abs(values), 0.99)),
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    spread = x.std() * y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / spread) if spread else 0.0
