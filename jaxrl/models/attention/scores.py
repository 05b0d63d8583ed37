"""Attention scores, computed from the products of queries and keys."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.precision import DType


@struct.dataclass
class Scoring:
    """A layer's scores."""

    # Number of tokens that a token attends to, including itself; None for all.
    window: int | None = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)  # factor of the products
    # Soft cap of the scores' magnitude (arXiv:2408.00118).
    cap: float | None = struct.field(pytree_node=False, default=None)
    # [H], a score per head that belongs to no key: it takes a share of the softmax and has no value
    # (arXiv:2309.17453, 2508.10925).
    sinks: jax.Array | None = None

    def scores(self, products: jax.Array) -> jax.Array:
        """Computes scores of products of any shape, in their dtype."""
        return soft_cap(products * self.scale, self.cap)

    def sink_scores(self, *, kv_heads: int, ndim: int, dtype: DType) -> jax.Array | None:
        """Returns the sinks as a column beside scores [B, K, H / K, ...] of `ndim` dimensions:
        [1, K, H / K, 1, ...]."""
        if self.sinks is None:
            return None
        return self.sinks.astype(dtype).reshape(1, kv_heads, -1, *(1,) * (ndim - 3))

    def slopes(self, scores: jax.Array) -> jax.Array | float:
        """Returns the derivatives of scores by their products. They stay finite where a score is
        masked, because they multiply a gradient of 0 there."""
        return self.scale * soft_cap_slope(scores, self.cap)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Computes cap * tanh(x / cap), or x for None; any shape.

    The maximum changes nothing. Without it, XLA would merge the last product with a later one if
    the factor is known at compile time: in the learner, but not in the sampler.
    """
    return x if cap is None else jnp.maximum(cap * jnp.tanh(x * (1 / cap)), -cap)


def soft_cap_slope(capped: jax.Array, cap: float | None) -> jax.Array | float:
    """Returns the derivative of `soft_cap` from its result. It is 0 below -cap, where only masked
    entries are."""
    return 1.0 if cap is None else 1 - jnp.square(jnp.maximum(capped, -cap) * (1 / cap))
