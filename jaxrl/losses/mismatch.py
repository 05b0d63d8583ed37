"""How far learner and sampler disagree about the tokens of a batch: what every step can afford."""

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses.ratios import LOG_RATIO_LIMIT


def mismatch(logprobs: jax.Array, batch: TokenBatch) -> Metrics:
    """Statistics of delta = learner - sampler over the action tokens whose sampler log-prob is
    known. What the policy has moved since it was sampled is part of delta; `split.split` tells it
    from the arithmetic.

    Args:
      logprobs: f32[B, T] of the learner.
      batch: with the sampler's.

    Returns:
      "mismatch/" "kl" E[-delta] and "k3_kl" E[w - log w - 1], nats, estimates of the divergence
      from the sampler; "chi2" E[w^2] - 1; "token_mult_error" E[exp |delta|], 1 where they agree;
      "prob_diff" E|p - q|. w = exp(delta), delta clamped to +-20.
    """
    known = batch.action_mask & ~jnp.isnan(batch.sampler_logprobs)
    sampler = jnp.where(known, batch.sampler_logprobs, 0)
    learner = jnp.where(known, jax.lax.stop_gradient(logprobs), 0).astype(jnp.float32)
    delta = jnp.clip(learner - sampler, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w = jnp.exp(delta)
    values = {
        "kl": -delta,
        "k3_kl": w - delta - 1,
        "chi2": w * w - 1,
        "token_mult_error": jnp.exp(jnp.abs(delta)),
        "prob_diff": jnp.abs(jnp.exp(learner) - jnp.exp(sampler)),
    }
    return {f"mismatch/{name}": masked_mean(value, known) for name, value in values.items()}
