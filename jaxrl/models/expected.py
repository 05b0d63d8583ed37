"""The mean of one model's log-probs under another's distribution, over the whole vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.kept import among, decode
from jaxrl.core.precision import Precision
from jaxrl.models.output_layer import Head, whole_logits
from jaxrl.models.slots import predicted

_POSITIONS = 64  # of a row at once; logits exist for no others


class Distributions(NamedTuple):
    """The distributions of a model's next tokens, as its head makes them."""

    hidden: jax.Array  # [B, T, D] after the final norm
    head: Head  # capped, at its temperature
    precision: Precision


def expected_logprobs(
    own: Distributions, other: Distributions, mask: jax.Array, *, kept: jax.Array | None = None
) -> jax.Array:
    """Computes the sum over the vocabulary of q(v) log p(v), p of `own` and q of `other`.

    Args:
      own: differentiable.
      other: without gradient.
      mask: bool[B, T], the tokens before which it is computed.
      kept: u8[B, T, 32], records of the tokens that truncated sampling kept (`core.kept`); both
        distributions are over them alone. None is the whole vocabulary.

    Returns:
      f32[B, T], in nats; entry t belongs to the distributions of token t, given the tokens before
      it. Entries outside the mask and entry 0 are 0 and have no gradient.
    """
    other = other._replace(hidden=lax.stop_gradient(other.hidden))
    length = mask.shape[1]
    size = min(_POSITIONS, length)
    mask = predicted(mask)
    padding = -length % size

    def chunks(x: jax.Array) -> jax.Array:
        wide = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return wide.reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1)

    # Position t - 1 predicts token t; outside the mask it may hold any value.
    rows = [jnp.where(mask[:, :, None], jnp.roll(one.hidden, 1, axis=1), 0) for one in (own, other)]

    @jax.checkpoint
    def mean(scanned: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        *states, records = scanned
        logits = [
            whole_logits(x, one.head, precision=one.precision)
            for x, one in zip(states, (own, other), strict=True)
        ]
        if records is not None:
            vocab_size = logits[0].shape[-1]
            within = among(decode(records, vocab_size), jnp.arange(vocab_size))
            logits = [jnp.where(within, z, jnp.finfo(z.dtype).min) for z in logits]
        mine, theirs = (jax.nn.log_softmax(z, axis=-1) for z in logits)
        return jnp.sum(jnp.exp(lax.stop_gradient(theirs)) * mine, axis=-1)

    found = lax.map(mean, (*map(chunks, rows), None if kept is None else chunks(kept)))
    found = found.swapaxes(0, 1).reshape(len(mask), -1)[:, :length]
    return jnp.where(mask, found, 0)
