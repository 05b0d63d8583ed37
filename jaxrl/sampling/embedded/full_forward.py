"""Decoding without a KV cache: a forward pass over the whole row for every token.

It serves models that are functions of tokens alone, such as modules of `models.nnx`. The work grows
with the square of the length.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.core.buckets import count_bucket, length_bucket
from jaxrl.core.compiled import jit_by_precision
from jaxrl.core.precision import Precision
from jaxrl.models.model import Model
from jaxrl.models.products import product
from jaxrl.models.spec import Params
from jaxrl.sampling.base import ClosedError, Completion, Turn
from jaxrl.sampling.embedded.batch_decoding import max_rows
from jaxrl.sampling.embedded.decode_steps import Segment, completion_keys, draw_next, no_tokens
from jaxrl.sampling.embedded.draw_token import DrawSettings
from jaxrl.sampling.embedded.request import DecodeRequest, PartialCompletion
from jaxrl.sampling.embedded.stopping import Ending, no_ending
from jaxrl.sharding.transfer import fetch


def decode_batch_without_cache(
    turns: Sequence[Turn], request: DecodeRequest
) -> Iterator[Completion]:
    """Decodes sequences together and yields completions, the shortest first, with the random
    numbers of `batch_decoding.decode_turns`.

    Raises:
      FloatingPointError: if the model's logits are not finite.
      ClosedError: once the sampler is closed.
    """
    if request.closed.is_set():
        raise ClosedError("the sampler was closed")
    width = length_bucket(max(len(turn.context) + turn.max_tokens for turn in turns), step=16)
    # A module may have no embedding of later positions, and NaN there would reach all tokens.
    width = min(width, request.model.config.max_positions)
    size = count_bucket(len(turns), multiple=request.shards)
    size = min(size, max_rows(request.max_batch, shards=request.shards))
    settings = request.settings
    rows = _rows(turns, size=size, width=width, ending=no_ending(size, settings.stops))
    out, length, stopped = fetch(
        _decode(
            request.weights,
            jax.tree.map(request.put, rows),
            key=request.key,
            settings=settings,
            model=request.model,
            precision=request.precision,
        )
    )
    completions = []
    for row, turn in enumerate(turns):
        one = PartialCompletion(turn)
        one.append(out, row=row, length=int(length[row]))
        done = one.finish(stopped=stopped[row], version=request.version, experts=None)
        completions.append(done)
    yield from sorted(completions, key=lambda c: (len(c.tokens), c.prompt_index, c.sample_index))


class _Rows(NamedTuple):
    """A batch before decoding; rows without a turn have a limit of 0."""

    tokens: jax.Array | np.ndarray  # i32[B, T], contexts followed by space for the completions
    lengths: jax.Array | np.ndarray  # i32[B] tokens of the contexts
    index: jax.Array | np.ndarray  # i32[B, 2], see `completion_keys`
    limit: jax.Array | np.ndarray  # i32[B], most tokens, which the row has space for
    ending: Ending  # of completions without tokens


def _rows(turns: Sequence[Turn], *, size: int, width: int, ending: Ending) -> _Rows:
    """Puts turns into the first of `size` rows of `width` tokens."""
    tokens, lengths = np.zeros((size, width), np.int32), np.ones(size, np.int32)
    index, limit = np.zeros((size, 2), np.int32), np.zeros(size, np.int32)
    for row, turn in enumerate(turns):
        lengths[row] = len(turn.context)
        tokens[row, : lengths[row]] = turn.context
        index[row], limit[row] = (turn.prompt_index, turn.sample_index), turn.max_tokens
    return _Rows(tokens, lengths, index, limit, ending)


@jit_by_precision(static_argnames=("model", "precision"))
def _decode(
    params: Params,
    batch: _Rows,
    *,
    key: jax.Array,
    settings: DrawSettings,
    model: Model,
    precision: Precision,
) -> tuple[Segment, jax.Array, jax.Array]:
    """Draws tokens until every row has ended; `params` are in `precision.compute`.

    Returns:
      The tokens drawn, with N = T; i32[B] tokens of the completions; bool[B] stopped.
    """
    rows, width = batch.tokens.shape
    limit, keys = jnp.asarray(batch.limit), completion_keys(key, batch.index)
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), batch.tokens.shape)
    out = no_tokens(width, rows, settings=settings)

    def running(length, stopped):
        return ~stopped & (length < limit)

    def more(carry):
        _, _, _, *ends = carry
        return jnp.any(running(*ends))

    def step(carry):
        tokens, out, ending, length, stopped = carry
        filled = batch.lengths + out.count
        segments = (slots < filled[:, None]).astype(jnp.int32)
        hidden = model.hidden(params, tokens, slots, segments, precision=precision)
        last = jnp.take_along_axis(hidden, filled[:, None, None] - 1, axis=1)[:, 0]
        head = model.unembedding(params)
        logits = product(last, head, contract=(1, 1), precision=precision)
        drawn, ending, ends = draw_next(
            logits.astype(precision.logits), keys, length, ending, settings=settings
        )
        tokens = tokens.at[jnp.arange(rows), filled].set(drawn.tokens, mode="drop")
        out = out.append(drawn)
        counts = running(length, stopped)
        return tokens, out, ending, length + counts, stopped | (ends & counts)

    ends = jnp.zeros_like(limit), jnp.zeros(rows, bool)
    start = (jnp.asarray(batch.tokens), out, jax.tree.map(jnp.asarray, batch.ending), *ends)
    _, out, _, length, stopped = lax.while_loop(more, step, start)
    return out, length, stopped
