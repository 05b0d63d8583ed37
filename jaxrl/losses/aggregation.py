"""Aggregations: reductions of per-token losses to one number, once, over the whole batch.

Sums run over action tokens and denominators over the whole batch: all devices, all microbatches. A
sequence without an action token is not counted.

Example:
  >>> from jaxrl.losses import objective, one_sequence, reinforce
  >>> scores, batch = one_sequence(advantages=[4, 1, 1], logprobs=-1)
  >>> batch = batch.replace(segments=jnp.array([[1, 2, 2]]))  # sequences of one token and of two
  >>> for how in (token_mean, sequence_mean_token_mean, sequence_mean_token_sum, token_sum):
  ...     goal = objective(reinforce(), how)
  ...     print(goal.total(scores, batch)[0] / goal.denominator(batch), how)
  -2.0 token_mean
  -2.5 sequence_mean_token_mean
  -3.0 sequence_mean_token_sum
  -6.0 token_sum
"""

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, action_sequences, action_tokens, sequence_weights
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.objectives import Aggregation


def _every_token(batch: TokenBatch) -> jax.Array:
    return batch.action_mask.astype(jnp.float32)


token_mean = Aggregation(_every_token, action_tokens, formula="token_mean")
"""Mean over all tokens: long sequences weigh more (DAPO)."""

sequence_mean_token_mean = Aggregation(
    sequence_weights, action_sequences, formula="sequence_mean_token_mean"
)
"""Mean over sequences of the mean over their tokens (GRPO)."""

sequence_mean_token_sum = Aggregation(
    _every_token, action_sequences, formula="sequence_mean_token_sum"
)
"""Mean over sequences of the sum over their tokens: the policy gradient of whole completions."""

token_sum = Aggregation(_every_token, lambda batch: jnp.float32(1), formula="token_sum")
"""Sum over all tokens."""


@with_formula
def fixed_length(max_length: int) -> Aggregation:
    """Sum over all tokens / (sequences x max_length): no bias by length (Dr. GRPO).

    Example:
      >>> from jaxrl.losses import objective, one_sequence, reinforce
      >>> scores, batch = one_sequence(advantages=[1, 1, 4], logprobs=-1)
      >>> goal = objective(reinforce(), fixed_length(12))
      >>> goal.total(scores, batch)[0] / goal.denominator(batch)
      Array(-0.5, dtype=float32)

    Raises:
      ValueError: if `max_length` is not positive.
    """
    if max_length <= 0:
        raise ValueError(f"fixed_length: max_length={max_length} must be > 0")
    return Aggregation(_every_token, lambda batch: action_sequences(batch) * max_length)
