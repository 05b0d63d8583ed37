"""Scores of a reward model: a decoder whose head gives each token one number.

The model equals `transformers.AutoModelForSequenceClassification` with one label: the score of a
sequence is the score of its last token other than the padding token.
"""

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.precision import Precision
from jaxrl.models.model import Model
from jaxrl.models.spec import Params


def token_scores(hidden: jax.Array, head: jax.Array, *, precision: Precision) -> jax.Array:
    """Computes the head's output at each token: hidden states after the final norm [B, T, D] and
    the head [1, D], both rounded to `compute` -> [B, T], rounded to `logits`, in `accumulate`."""
    wide = precision.accumulate
    x, weight = (a.astype(precision.compute).astype(wide) for a in (hidden, head))
    return jnp.sum(x * weight[None], axis=-1).astype(precision.logits).astype(wide)


def token_values(
    hidden: jax.Array, head: jax.Array, batch: TokenBatch, *, precision: Precision | str
) -> jax.Array:
    """Computes the value before each action token: `token_scores` at the previous token, f32[B, T];
    0 at all other tokens. A sequence never begins with an action, but with a prompt."""
    scores = token_scores(hidden, head, precision=Precision.of(precision))
    return jnp.where(batch.action_mask, jnp.roll(scores, 1, axis=1), 0)


def sequence_scores(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision | str
) -> jax.Array:
    """Computes the score of each sequence of a batch, in rows of any layout.

    `model` is a scorer (`config.scored` is true) and `weights` its parameters in
    `precision.compute`. Returns f32[B, T + 1]: entry s of a row is the score of its sequence s, and
    0 if the row has none.
    """
    tokens, segments = batch.tokens, batch.segments
    precision = Precision.of(precision)
    hidden = model.hidden_of(weights, batch, precision=precision)
    scores = token_scores(hidden, model.unembedding(weights), precision=precision)
    pad_id = model.config.pad_id
    counted = jnp.ones_like(tokens, bool) if pad_id is None else tokens != pad_id
    last = jax.vmap(_last)(segments, counted & (segments > 0))
    return jnp.where(last >= 0, jnp.take_along_axis(scores, jnp.maximum(last, 0), axis=1), 0)


def _last(segments: jax.Array, counts: jax.Array) -> jax.Array:
    """Finds the index of each sequence's last counted token, i32[T + 1]; -1 if it has none."""
    size = segments.shape[0]
    places = jnp.where(counts, jnp.arange(size), -1)
    return jnp.full(size + 1, -1).at[segments].max(places)
