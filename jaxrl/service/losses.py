"""The losses that the Tinker API names: functions of log-probs and of the arrays of a datum.

The service sums a loss over all tokens. Each but `dro` equals a composition of `jaxrl.losses`; see
tests/service/test_losses.py. The recipes of `jaxrl.losses` have names of their own.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import losses
from jaxrl.core import TokenBatch
from jaxrl.losses import Scores

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
      marks: the array, if any, that is not 0 at the tokens the policy sampled.
      single: whether there is one target per token.
    """

    apply: Callable[[jax.Array, Arrays, Callable[[jax.Array, jax.Array], jax.Array]], jax.Array]
    inputs: tuple[str, ...]
    settings: Mapping[str, float] = {}
    per_token: tuple[str, ...] = ()
    marks: str | None = None
    single: bool = False


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
    "gspo": Loss(
        _gspo,
        (*_POLICY, "sequence_ratio_mask"),
        _bounded(1 - 3e-4, 1 + 4e-4),
        _BOUNDS,
        marks="sequence_ratio_mask",
    ),
}
"""The losses by name, with the documented constants of the Tinker API."""

NOT_HERE: Mapping[str, str] = {
    "stable_reinforce": "its formula is not public; use importance_sampling, ppo, cispo or gspo"
}
"""Losses that the client's types list and the service refuses, with the advice."""

OURS = "jaxrl."
"""The beginning of a recipe's name, as in "jaxrl.dapo"."""


def find(text: str) -> Loss:
    """Returns the loss of a name; settings of a recipe follow it, as in "jaxrl.cispo high=4".

    Raises:
      ValueError: for a setting that the recipe does not have or take, and a recipe that reads more
        than the log-probs and advantages of a sequence.
    """
    return LOSSES[text] if text in LOSSES else _of_recipe(text)


def named(name: str, settings: Mapping[str, float | str]) -> str:
    """Writes a recipe with its settings as `find` reads them."""
    shown = (
        f"{key}={int(value) if isinstance(value, float) and value.is_integer() else value}"
        for key, value in sorted(settings.items())
    )
    return " ".join([name, *shown])


@functools.lru_cache(maxsize=64)
def _of_recipe(text: str) -> Loss:
    """The loss per token of a recipe, before its reduction."""
    name, *given = text.removeprefix(OURS).split()
    # The length only divides the sum, which the service leaves out.
    settings = dict(_setting(one) for one in given)
    objective = losses.build(name, settings, known={"max_length": 1}).objective
    if objective.needs or objective.whole or objective.others or objective.among is not None:
        raise ValueError(
            f"{OURS}{name} reads more than a sequence's log-probs and advantages; compute it in "
            "the client with forward_backward_custom, or use jaxrl train"
        )

    def apply(logprobs: jax.Array, x: Arrays, mean: Any) -> jax.Array:
        shape = (-1, x["segments"].shape[-1])
        batch = TokenBatch(
            tokens=x["targets"].reshape(shape),
            segments=x["segments"].reshape(shape),
            positions=x["positions"].reshape(shape),
            action_mask=x["action_mask"].reshape(shape) != 0,
            sampler_logprobs=x["logprobs"].reshape(shape),
            advantages=x["advantages"].reshape(shape),
        )
        found, _ = objective.loss.apply(Scores(logprobs=logprobs.reshape(shape)), batch)
        return jnp.where(batch.action_mask, found, 0).reshape(logprobs.shape)

    return Loss(apply, (*_POLICY, "action_mask"), marks="action_mask", single=True)


def _setting(text: str) -> tuple[str, Any]:
    key, value = text.split("=", 1)
    try:
        return key, int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return key, value
