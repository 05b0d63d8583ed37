"""The alpha/beta split of the log importance ratio: policy movement and arithmetic.

log r = learner - sampler = alpha + beta, in nats. alpha = shadow - sampler: the policy moved.
beta = learner - shadow: the same weights, other numerics. The shadow is a forward pass of the
learner's weights in the sampler's dtypes. PPO's clip sees only the sum. A clip is a phantom if the
clipped branch is taken at alpha + beta and would not be at alpha.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.core.batch import Minibatch
from jaxrl.core.compiled import jit
from jaxrl.learner.policy import Learner
from jaxrl.losses.ratios import LOG_RATIO_LIMIT
from jaxrl.sharding.transfer import fetch

_DECILES = 10


class LogRatio(NamedTuple):
    """Log-probs of M action tokens, in the order of their sequences, and their log-ratio.

    `log r = learner - sampler = alpha + beta`, in nats.
    """

    learner: np.ndarray  # f64[M]
    shadow: np.ndarray  # f64[M]
    sampler: np.ndarray  # f64[M]
    advantages: np.ndarray  # f64[M]
    sequences: np.ndarray  # i64[M], index of the token's sequence, from 0

    @property
    def alpha(self) -> np.ndarray:
        """Movement of the policy, shadow - sampler, f64[M] in nats."""
        return self.shadow - self.sampler

    @property
    def beta(self) -> np.ndarray:
        """Difference in arithmetic at the same weights, learner - shadow, f64[M] in nats."""
        return self.learner - self.shadow


class Split(NamedTuple):
    """Log-probs of a minibatch's tokens by learner, shadow and sampler, on the host."""

    learner: np.ndarray  # f32[N, T]
    shadow: np.ndarray  # f32[N, T]
    sampler: np.ndarray  # f32[N, T], NaN where the sampler reported none
    entropies: np.ndarray  # f32[N, T], of the shadow's distributions, in nats
    advantages: np.ndarray  # f32[N, T]
    action_mask: np.ndarray  # bool[N, T], tokens that the policy chose
    segments: np.ndarray  # i32[N, T], sequence within the row, 0 for padding

    def tokens(self) -> LogRatio:
        """Selects the action tokens that have a sampler log-prob."""
        chosen = self.action_mask & ~np.isnan(self.sampler)
        segments = self.segments
        rows = np.arange(len(segments))[:, None] * (segments.max(initial=0) + 1) + segments
        arrays = (self.learner, self.shadow, self.sampler, self.advantages)
        wide = (x[chosen].astype(np.float64) for x in arrays)
        return LogRatio(*wide, sequences=np.unique(rows[chosen], return_inverse=True)[1])


def split(learner: Learner, minibatch: Minibatch, *, params: Any) -> Split:
    """Scores a minibatch with the learner and its shadow, in two forward passes.

    The sampler's log-probs come with the rollouts; any sampler may have recorded them. With several
    processes all must call it.

    Args:
      learner: functions that are not compiled yet are compiled with `jaxrl.jit`. With `sums=fixed`
        in the precision, compile them yourself.
      minibatch: as for `Learner.step`.
      params: the learner's parameters, at the moment to diagnose: alpha is their distance from the
        weights that sampled the tokens.
    """
    # Without the loss's scores this is the program that computed them, compiled already.
    bare, batch = dataclasses.replace(minibatch, anchor=None, reference=None), minibatch.batch
    scored = {
        "learner": _compiled(learner.score)(params, bare),
        "shadow": _compiled(learner.shadow_scores)(params, bare),
        "sampler": batch.sampler_logprobs,
        "advantages": batch.advantages,
        "action_mask": batch.action_mask,
        "segments": batch.segments,
    }
    found = fetch(scored)
    shadow, entropies = found.pop("shadow")
    return Split(**found, shadow=shadow, entropies=entropies)


def _compiled(function: Callable[..., Any]) -> Any:
    return function if isinstance(function, jax.stages.Wrapped) else jit(function)


def split_log_ratio(tokens: LogRatio, *, low: float, high: float) -> dict[str, float]:
    """Computes metrics of the log-ratio of at least one token and of its parts. PPO clips ratios
    below 1 - low and above 1 + high.

    Returns:
      With delta the log-ratio, w = exp delta and A the advantage:
      "alpha", "beta": `moments`, in nats; "beta_decile_0" to "_9": mean |beta| by the sampler's
      probability, the rarest tenth of the tokens first; "beta_advantage": correlation of beta and
      A; "clipped", "clipped_low", "clipped_high": shares of tokens whose clipped branch is taken
      (A < 0 below 1 - low, A > 0 above 1 + high); "phantom": share clipped at alpha + beta but not
      at alpha; "phantom_share": the same of the clipped tokens; "weight_correlation",
      "weight_difference": of the weights w A that the tokens' gradients have without a clip, and
      those at alpha alone, e^alpha A: correlation, and norm of the difference relative to the
      latter's; "kl": E[-delta]; "k3_kl": E[w - delta - 1]; "chi2_token", "chi2_sequence":
      E[w^2] - 1; "ess": E[w]^2 / E[w^2];
      "prob_diff_mean", "_p99", "_max": difference of the probabilities; "pearson": their
      correlation; "sequence_std": of the summed delta; "sequence_std_per_sqrt_token". The
      correlation with a constant is 0.
    """
    alpha, beta = tokens.alpha, tokens.beta
    delta = np.clip(alpha + beta, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    p, q = np.exp(tokens.learner), np.exp(tokens.sampler)
    up, down = tokens.advantages > 0, tokens.advantages < 0
    highest, lowest = np.log1p(high), np.log1p(-low) if low < 1 else -np.inf
    above, below = up & (delta > highest), down & (delta < lowest)
    real = (up & (alpha > highest)) | (down & (alpha < lowest))
    phantom = (above | below) & ~real
    w = np.exp(delta)
    weights = w * tokens.advantages
    clean = np.exp(np.clip(alpha, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) * tokens.advantages
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
        "weight_correlation": _correlation(weights, clean),
        "weight_difference": _relative(weights - clean, clean),
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
    """Computes the mean NAME, NAME_std and, of the magnitude, NAME_p99 of values f[N]; {} for N =
    0."""
    if not values.size:
        return {}
    return {
        name: float(values.mean()),
        f"{name}_std": float(values.std()),
        f"{name}_p99": float(np.quantile(np.abs(values), 0.99)),
    }


def _relative(part: np.ndarray, whole: np.ndarray) -> float:
    norm = np.linalg.norm(whole)
    return float(np.linalg.norm(part) / norm) if norm else 0.0


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    spread = x.std() * y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / spread) if spread else 0.0
