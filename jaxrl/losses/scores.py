"""Scores: the log-probs, entropies and values that losses read, computed only on demand."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.batch import TokenBatch


class Need(enum.StrEnum):
    """A score that costs something and is computed only when a loss needs it."""

    ENTROPY = "entropy"  # of the learner's distribution at each token
    ANCHOR = "anchor"  # log-probs of the learner at the start of the update
    SHADOW = "shadow"  # log-probs of the same weights in the sampler's dtypes
    EXPECTED = "expected"  # mean of the learner's log-probs under the shadow's distribution
    REFERENCE = "reference"  # log-probs of the frozen reference model
    VALUES = "values"  # a critic's expectation before each token
    IMBALANCE = "imbalance"  # unevenness of the learner's routing to experts
    OBSERVED = "observed"  # log-probs of the learner for tokens that the environment wrote


@struct.dataclass(kw_only=True)
class Scores:
    """The scores that a loss may read; entry t scores tokens[:, t] given the tokens before it.

    Only `logprobs`, `entropy`, `expected`, `values`, `imbalance` and `observed` carry a gradient. A
    score that no loss needs is None.
    """

    logprobs: jax.Array  # f32[B, T], the learner
    entropy: jax.Array | None = None  # f32[B, T], nats
    anchor: jax.Array | None = None  # f32[B, T]
    shadow: jax.Array | None = None  # f32[B, T]
    expected: jax.Array | None = None  # f32[B, T], sum over the vocabulary of q log p; q: shadow
    reference: jax.Array | None = None  # f32[B, T]
    values: jax.Array | None = None  # f32[B, T], of a critic, differentiable
    imbalance: jax.Array | None = None  # f32[B, T], see `models.experts.imbalance`
    observed: jax.Array | None = None  # f32[B, T], the learner, at `core.batch.observed` tokens
    # f32[B, T] for each of the weights that are computed over the whole batch.
    whole: dict[str, jax.Array] | None = None


def require(scores: Scores, need: Need) -> jax.Array:
    """Returns a score that the loss declared to need, f32[B, T].

    Example:
      >>> scores, _ = one_sequence(advantages=[1, 1], logprobs=[-1, -2], reference=[-1.5, -2])
      >>> scores.logprobs - require(scores, Need.REFERENCE)
      Array([[0.5, 0. ]], dtype=float32)

    Raises:
      ValueError: if it was not computed; the message names it.
    """
    value = getattr(scores, need.value)
    if value is None:
        raise ValueError(
            f"the loss reads scores.{need.value}, which was not computed: declare Need.{need.name} "
            "where the loss is made, and build the learner with this objective"
        )
    return value


def one_sequence(
    *,
    advantages: Any,
    logprobs: Any,
    sampler: Any = None,
    rewards: Any = 0.0,
    action_mask: Any = True,
    **scores: Any,
) -> tuple[Scores, TokenBatch]:
    """Makes the scores and the batch of one sequence, to try a loss on a few numbers.

    Example:
      >>> from jaxrl.losses import over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], sampler=-1)
      >>> over_sampler.log(scores, batch)
      Array([[0. , 0.5]], dtype=float32)

    Args:
      advantages: one number per token; the other arguments are per token too, or one number.
      logprobs: log-probs of the learner.
      sampler: log-probs of the sampler; the learner's by default.
      rewards: rewards of the sequence.
      action_mask: False at tokens that the policy did not choose.
      **scores: the other fields of `Scores`.
    """
    shape = (1, len(advantages))

    def row(values: Any, dtype: Any = None) -> jax.Array:
        dtype = jnp.result_type(float) if dtype is None else dtype
        return jnp.broadcast_to(jnp.asarray(values, dtype), shape)

    batch = TokenBatch(
        tokens=row(0, jnp.int32),
        segments=row(1, jnp.int32),
        positions=row(range(shape[1]), jnp.int32),
        action_mask=row(action_mask, bool),
        sampler_logprobs=row(logprobs if sampler is None else sampler),
        advantages=row(advantages),
        rewards=row(rewards),
    )
    others: dict[str, Any] = {name: row(values) for name, values in scores.items()}
    return Scores(logprobs=row(logprobs), **others), batch
