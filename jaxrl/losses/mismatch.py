"""Log-prob mismatch between learner and sampler, cheap enough to measure at every step."""

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_means
from jaxrl.losses.ratios import LOG_RATIO_LIMIT


def mismatch(logprobs: jax.Array, batch: TokenBatch) -> Metrics:
    """Computes statistics of delta = learner - sampler over action tokens with a known sampler
    log-prob; `logprobs`, f32[B, T], are the learner's. Delta includes the policy's change since
    sampling; `split_log_ratio` separates that change from rounding.

    Returns:
      "mismatch/" "kl" E[-delta] and "k3_kl" E[w - log w - 1], nats, estimates of the divergence
      from the sampler; "chi2" E[w^2] - 1; "token_mult_error" E[exp |delta|], 1 where they agree;
      "prob_diff" E|p - q|. w = exp(delta), delta clamped to +-20.
    """
    known = batch.action_mask & ~jnp.isnan(batch.sampler_logprobs)
    sampler = jnp.where(known, batch.sampler_logprobs, 0)
    learner = jnp.where(known, logprobs, 0).astype(jnp.float32)
    delta = jnp.clip(learner - sampler, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w = jnp.exp(delta)
    values = {
        "mismatch/kl": -delta,
        "mismatch/k3_kl": w - delta - 1,
        "mismatch/chi2": w * w - 1,
        "mismatch/token_mult_error": jnp.exp(jnp.abs(delta)),
        "mismatch/prob_diff": jnp.abs(jnp.exp(learner) - jnp.exp(sampler)),
    }
    return masked_means(values, known)
