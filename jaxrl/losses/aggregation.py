"""How losses per token become one number, once, over the whole batch.

Sums run over action tokens and denominators over the whole batch: all devices, all microbatches. A
sequence without an action token is in no count.
"""

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, action_sequences, action_tokens, sequence_weights
from jaxrl.losses.algebra import Aggregation


def _every_token(batch: TokenBatch) -> jax.Array:
    return batch.action_mask.astype(jnp.float32)


token_mean = Aggregation(_every_token, action_tokens)
"""Mean over all tokens: long sequences weigh more (DAPO)."""

sequence_mean_token_mean = Aggregation(sequence_weights, action_sequences)
"""Mean over sequences of the mean over their tokens (GRPO)."""

sequence_mean_token_sum = Aggregation(_every_token, action_sequences)
"""Mean over sequences of the sum over their tokens: the policy gradient of whole answers."""

token_sum = Aggregation(_every_token, lambda batch: jnp.float32(1))
"""Sum over all tokens."""


def fixed_length(max_length: int) -> Aggregation:
    """Sum over all tokens / (sequences x max_length): no bias by length (Dr. GRPO).

    Raises:
      ValueError: if `max_length` is not positive.
    """
    if max_length <= 0:
        raise ValueError(f"fixed_length: max_length={max_length} must be positive")
    return Aggregation(_every_token, lambda batch: action_sequences(batch) * max_length)
