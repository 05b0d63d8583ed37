"""Log-probs of targets, which stand at the position that predicts them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core import Precision
from jaxrl.models import token_logprobs


def target_logprobs(
    hidden: jax.Array, head: Any, arrays: Mapping[str, jax.Array], *, precision: Precision
) -> jax.Array:
    """Computes log-probs of targets, f32[B, T, K], from hidden states [B, T, D]; 0 outside the
    mask. The last token of each row is padding."""
    rows = hidden.shape[:2]
    targets = arrays["targets"].reshape(*rows, -1)
    mask = jnp.roll(arrays["mask"].reshape(rows), 1, axis=1)

    def of(column: jax.Array) -> jax.Array:
        # The library scores a token with the position before it, a target is scored with its own.
        shifted = jnp.roll(column, 1, axis=1)
        found = token_logprobs(hidden, head, shifted, mask, precision=precision.inside("head"))
        return jnp.roll(found, -1, axis=1)

    if targets.shape[2] == 1:
        return of(targets[:, :, 0])[:, :, None]
    return jnp.moveaxis(jax.lax.map(of, jnp.moveaxis(targets, 2, 0)), 0, 2)
