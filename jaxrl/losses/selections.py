"""Selections: weights of 1 and 0 that compare a token with all others of the batch.

They are computed over the whole batch, before its microbatches (`algebra.whole_batch`), because a
microbatch has other quantiles. Each reports the share of action tokens that it selects. A share of
the tokens is rounded down, to at least one token; ties with the last one are selected too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, action_tokens, earlier_actions
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses.algebra import Weights, of_whole_batch
from jaxrl.losses.scores import Need, Scores, require


@of_whole_batch
def top_entropy(share: float = 0.2) -> Weights:
    """1 for the share of the batch's tokens at which the learner's entropy is highest, 0 for the
    others, which stay in the denominator (arXiv:2506.01939; TRL's top_entropy_quantile). Reports
    "selected/entropy".

    Example:
      >>> from jaxrl.losses import objective, one_sequence, reinforce, token_mean
      >>> scores, batch = one_sequence(advantages=[1] * 4, logprobs=-1, entropy=[0.5, 2, 0, 1])
      >>> goal = objective(top_entropy(0.5) * reinforce(), token_mean)
      >>> scores, metrics = goal.survey(scores, batch)
      >>> print(scores.whole["top_entropy(0.5)"], goal.total(scores, batch)[0])
      [[0. 1. 0. 1.]] -2.0

    Raises:
      ValueError: unless 0 < share <= 1.
    """
    _check(share, reader="top_entropy")

    def chosen(scores: Scores, batch: TokenBatch) -> jax.Array:
        entropy = require(scores, Need.ENTROPY)
        return _largest(_ordered(entropy), batch.action_mask, count=_number(batch, share))

    return _selection(chosen, Need.ENTROPY, name="entropy")


@of_whole_batch
def top_covariance(share: float = 2e-4) -> Weights:
    """1 for the share of the batch's tokens with the largest (log pi - mean) (A - mean), their part
    in the covariance that lowers the entropy, 0 for the others: the tokens of KL-Cov
    (arXiv:2505.22617). Means are over the batch. Reports "selected/covariance".

    Example:
      >>> from jaxrl.losses import objective, one_sequence, reinforce, token_mean
      >>> scores, batch = one_sequence(advantages=[1, 1, -1, -1], logprobs=[-1, -2, -3, -1])
      >>> goal = objective(top_covariance(0.25) * reinforce(), token_mean)
      >>> print(goal.survey(scores, batch)[0].whole["top_covariance(0.25)"])
      [[0. 0. 1. 0.]]

    Raises:
      ValueError: unless 0 < share <= 1.
    """
    _check(share, reader="top_covariance")

    def chosen(scores: Scores, batch: TokenBatch) -> jax.Array:
        keys = _ordered(_covariance(scores, batch))
        return _largest(keys, batch.action_mask, count=_number(batch, share))

    return _selection(chosen, name="covariance")


@of_whole_batch
def without_covariance(share: float = 2e-4, *, low: float = 1.0, high: float = 5.0) -> Weights:
    """0 for some of the tokens whose part in the covariance lies between `low` and `high`, 1 for
    the others: Clip-Cov stops the gradient of a share of the batch's tokens, or of all between the
    bounds if they are fewer (arXiv:2505.22617). Reports "selected/covariance", the share of tokens
    that are stopped.

    The paper draws them at random. Here a hash of token, place and log-prob draws them, so that a
    step remains a function of its batch, in every layout. As in the paper, tokens that PPO's clip
    stops may be drawn too; veRL leaves them out.

    Example:
      >>> from jaxrl.losses import objective, one_sequence, reinforce, token_mean
      >>> scores, batch = one_sequence(advantages=[1, 1, -1, -1], logprobs=[-1, -2, -3, -1])
      >>> goal = objective(without_covariance(1.0, low=0.5) * reinforce(), token_mean)
      >>> scores, _ = goal.survey(scores, batch)  # the parts are 0.75, -0.25, 1.25 and -0.75
      >>> print(scores.whole["without_covariance(1.0, low=0.5, high=5.0)"])
      [[0. 1. 0. 1.]]

    Raises:
      ValueError: unless 0 < share <= 1 and low < high.
    """
    _check(share, reader="without_covariance")
    if not low < high:
        raise ValueError(f"without_covariance: low={low} must be < high={high}")

    def stopped(scores: Scores, batch: TokenBatch) -> jax.Array:
        covariance = _covariance(scores, batch)
        between = batch.action_mask & (covariance > low) & (covariance < high)
        return _largest(_hash(scores, batch), between, count=_number(batch, share))

    return _selection(stopped, name="covariance", otherwise=1.0)


def _check(share: float, *, reader: str) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{reader}: share={share} must be > 0 and <= 1")


def _selection(
    chosen: Callable[[Scores, TokenBatch], jax.Array],
    *needs: Need,
    name: str,
    otherwise: float = 0.0,
) -> Weights:
    """Makes weights from (scores, batch) -> bool[B, T]: chosen tokens get 1 - otherwise."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        marks = chosen(jax.lax.stop_gradient(scores), batch)
        weights = jnp.where(marks, 1.0 - otherwise, otherwise)
        return weights, {f"selected/{name}": masked_mean(marks, batch.action_mask)}

    return Weights(frozenset(needs), apply)


def _covariance(scores: Scores, batch: TokenBatch) -> jax.Array:
    def centred(values: jax.Array) -> jax.Array:
        return values - masked_mean(values, batch.action_mask).value

    return centred(scores.logprobs) * centred(batch.advantages)


def _number(batch: TokenBatch, share: float) -> jax.Array:
    """Counts the share of the batch's action tokens: i32[], at least 1."""
    return jnp.maximum(jnp.floor(share * action_tokens(batch)), 1).astype(jnp.int32)


def _ordered(values: jax.Array) -> jax.Array:
    """Maps numbers to u32 of the same order."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32) + 0.0, jnp.uint32)  # no -0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(keys: jax.Array, mask: jax.Array, *, count: jax.Array) -> jax.Array:
    """Marks the `count` largest keys, u32[B, T], within a mask; all of it if it holds fewer.

    The least of them is found bit by bit: 32 counts over the batch need no sort, and on a mesh no
    device sees another's keys.
    """

    def longer(i: jax.Array, least: jax.Array) -> jax.Array:
        trial = least | jnp.uint32(1) << (31 - i).astype(jnp.uint32)
        enough = jnp.sum(mask & (keys >= trial), dtype=jnp.int32) >= count
        return jnp.where(enough, trial, least)

    return mask & (keys >= jax.lax.fori_loop(0, 32, longer, jnp.uint32(0)))


def _hash(scores: Scores, batch: TokenBatch) -> jax.Array:
    """Hashes token, place and log-prob: u32[B, T] (MurmurHash3's finalizer, public domain)."""
    found = jax.lax.bitcast_convert_type(scores.logprobs.astype(jnp.float32), jnp.uint32)
    for part in (batch.tokens, earlier_actions(batch)):
        found = found ^ part.astype(jnp.uint32)
        found = (found ^ found >> 16) * jnp.uint32(0x85EBCA6B)
        found = (found ^ found >> 13) * jnp.uint32(0xC2B2AE35)
        found = found ^ found >> 16
    return found
