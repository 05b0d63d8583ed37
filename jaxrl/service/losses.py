"""The losses that the Tinker API names: functions of log-probs and of the arrays of a datum.

The service sums a loss over all tokens. Each equals a composition of `jaxrl.losses`; see
tests/service/test_losses.py.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]


class Loss(NamedTuple):
    """One loss per token.

    Attributes:
      apply: (log-probs of the targets, arrays, means over a sequence's marked tokens) -> loss per
        token. All are f32[B, T], or f32[B, T, K] with K targets per token.
      inputs: names of the arrays that each datum must have.
      settings: numbers of `loss_fn_config`, with their defaults. Those of `per_token` may also be
        given as arrays of a datum.
      per_token: see `settings`.
    """

    apply: Callable[[jax.Array, Arrays, Callable[[jax.Array, jax.Array], jax.Array]], jax.Array]
    inputs: tuple[str, ...]
    settings: Mapping[str, float] = {}
    per_token: tuple[str, ...] = ()


def _cross_entropy(logprobs, x, mean):
    """-log p * weight; a gradient of any loss of log-probs, given as weights, passes through."""
    return -logprobs * x["weights"]


def _importance_sampling(logprobs, x, mean):
    """-p / q A: `unclipped(over_sampler)`."""
    return -jnp.exp(logprobs - x["logprobs"]) * x["advantages"]


def _ppo(logprobs, x, mean):
    """-min(r A, clip(r) A) (arXiv:1707.06347): `clipped(over_sampler)`."""
    return _clipped(jnp.exp(logprobs - x["logprobs"]), x)


def _gspo(logprobs, x, mean):
    """PPO with the geometric mean of the ratios of a sequence's marked tokens, and each token's own
    gradient (GSPO-token, arXiv:2507.18071): `clipped(sequence(over_sampler))`."""
    fixed = jax.lax.stop_gradient(logprobs)
    log_ratio = mean(fixed - x["logprobs"], x["sequence_ratio_mask"])
    return _clipped(jnp.exp(log_ratio + logprobs - fixed), x)


def _cispo(logprobs, x, mean):
    """-sg(clip(r)) A log p (arXiv:2506.13585): `truncated(over_sampler) * likelihood()`."""
    ratio = jnp.exp(logprobs - x["logprobs"])
    weight = jnp.clip(ratio, x["clip_low_threshold"], x["clip_high_threshold"])
    return -jax.lax.stop_gradient(weight) * x["advantages"] * logprobs


def _dro(logprobs, x, mean):
    """-(log p A - beta / 2 (log p - log q)^2) (arXiv:2405.19107)."""
    penalty = 0.5 * x["beta"] * (logprobs - x["logprobs"]) ** 2
    return penalty - logprobs * x["advantages"]


def _clipped(ratio, x):
    inside = jnp.clip(ratio, x["clip_low_threshold"], x["clip_high_threshold"])
    return -jnp.minimum(ratio * x["advantages"], inside * x["advantages"])


_POLICY = ("logprobs", "advantages")
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")


def _bounded(low: float, high: float) -> dict[str, float]:
    return dict(zip(_BOUNDS, (low, high), strict=True))


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, ("weights",)),
    "importance_sampling": Loss(_importance_sampling, _POLICY),
    "ppo": Loss(_ppo, _POLICY, _bounded(0.8, 1.2), _BOUNDS),
    "cispo": Loss(_cispo, _POLICY, _bounded(0.0, 4.0), _BOUNDS),
    "dro": Loss(_dro, _POLICY, {"beta": 0.05}),
    # The thresholds of GSPO's paper.
    "gspo": Loss(_gspo, (*_POLICY, "sequence_ratio_mask"), _bounded(1 - 3e-4, 1 + 4e-4), _BOUNDS),
}
"""The losses by name, with the documented constants of the Tinker API."""

NOT_HERE: Mapping[str, str] = {
    "stable_reinforce": "its formula is not public; use importance_sampling, ppo, cispo or gspo",
    "custom": "this server runs no uploaded loss; forward_backward_custom with a function works",
}
"""Losses that the client's types list and the service refuses, with the advice."""
