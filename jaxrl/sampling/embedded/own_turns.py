"""Turns with settings and adapters of their own, decoded in one batch by one program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.buckets import count_bucket
from jaxrl.core.compiled import jit_forward
from jaxrl.models.adapter_rows import AdapterRows
from jaxrl.sampling.base import OwnTurn, SamplingParams
from jaxrl.sampling.embedded.draw_token import DrawSettings, RowSettings
from jaxrl.sampling.embedded.stopping import NEVER, Stops, stop_table
from jaxrl.sampling.embedded.truncation import Truncation
from jaxrl.sampling.stop_texts import StopTexts


class OwnTurns:
    """The settings of N turns as arrays, from which the rows of a batch are taken.

    Sizes are powers of two, and what no turn needs is left out, so that few programs are compiled.
    """

    def __init__(self, turns: Sequence[OwnTurn], *, adapters: int, parts: int) -> None:
        """Reads the settings of turns, with this many stacked adapters; rows are divided over
        `parts` devices."""
        params = [one.params for one in turns]
        greedy = np.array([one.temperature == 0 for one in params])

        def setting(name: str, neutral: float, dtype: type) -> Any:
            values = np.array([getattr(one, name) for one in params], dtype)
            values = np.where(greedy, np.asarray(neutral, dtype), values)  # greedy ignores it
            return values if np.any(values != np.asarray(neutral, dtype)) else None

        table, (chosen, texts) = _tables(params), _texts(params)
        self._rows = RowSettings(
            temperature=np.array([one.temperature for one in params], np.float32),
            truncation=Truncation(
                min_p=setting("min_p", 0, np.float32),
                top_k=setting("top_k", 0, np.int32),
                top_p=setting("top_p", 1, np.float32),
            ),
            stops=table,
            texts=chosen,
            adapters=_adapter_rows(turns, adapters, parts) if adapters else None,
        )
        self._index = np.array([(t.prompt_index, t.sample_index) for t, *_ in turns], np.int32)
        self._seeds = np.array([(one.seed % 2**32, one.seed // 2**32) for one in params], np.uint32)
        self.prefix = [(one.adapters, one.turn.context.tobytes()) for one in turns]
        self.settings = DrawSettings(
            temperature=None,
            truncation=Truncation(),
            stops=Stops(np.zeros((0, table.shape[2]), np.int32), texts),
            record=False,
        )

    def rows(self, places: Sequence[int], *, size: int) -> RowSettings:
        """Returns the settings of the turns at `places`, for a batch of `size` rows; the last rows
        may have anyone's, but no adapter."""
        rows = jax.tree.map(lambda x: x[_padded(places, size)], self._rows)
        return dataclasses.replace(rows, adapters=self.adapters(places, size=size))

    def adapters(self, places: Sequence[int], *, size: int) -> AdapterRows | None:
        """Returns the adapters of the turns at `places`, for a batch of `size` rows."""
        if self._rows.adapters is None:
            return None
        which = np.full(size, -1, np.int32)
        which[: len(places)] = self._rows.adapters.which[list(places)]
        return dataclasses.replace(self._rows.adapters, which=which)

    def index(self, places: Sequence[int]) -> np.ndarray:
        """Returns the prompt and sample indices that random numbers depend on, i32[n, 2]."""
        return self._index[list(places)]

    def keys(self, places: Sequence[int], *, size: int) -> jax.Array:
        """Returns the keys of the seeds of a batch's rows, key[size]."""
        return _keys(self._seeds[_padded(places, size)])


def _adapter_rows(turns: Sequence[OwnTurn], count: int, parts: int) -> AdapterRows:
    which = np.array([-1 if one.adapters is None else one.adapters for one in turns], np.int32)
    most = int(np.bincount(which + 1, minlength=count + 1)[1:].max())
    # Of equal shares, so that few programs are compiled: together they are no more than the batch.
    share = count_bucket(len(turns)) // count
    return AdapterRows(which, count, count_bucket(max(most, share)), parts)


def _padded(places: Sequence[int], size: int) -> np.ndarray:
    return np.array([*places, *[0] * (size - len(places))], np.int32)


@jit_forward
def _keys(seeds: jax.Array) -> jax.Array:
    def one(seed: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])

    return jax.vmap(one)(jnp.asarray(seeds))


def _tables(params: Sequence[SamplingParams]) -> np.ndarray:
    """Returns the stop sequences of each turn, i32[N, M, S]."""
    found = [stop_table(one.stop) for one in params]
    longest = max(1, *(table.shape[1] for table in found))  # nothing would match everything
    count = count_bucket(max(len(table) for table in found))
    tables = np.full((len(found), count, longest), NEVER, np.int32)
    for mine, one in zip(tables, params, strict=True):
        # A sequence of wildcards in front makes all tables equally wide.
        table = stop_table((*one.stop, (NEVER,) * longest))[:-1]
        mine[: len(table)] = table
    return tables


def _texts(
    params: Sequence[SamplingParams],
) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
    """Returns the automaton of each turn, i32[N], and all of them: the rows of tokens i32[A, V],
    the moves i32[A, R, S] and the states of complete texts i32[A]. None without texts."""
    known: dict[int, StopTexts] = {id(t): t for p in params if (t := p.stop_texts) is not None}
    if not known:
        return None, None
    each = list(known.values())
    count = count_bucket(len(each) + 1)  # the last ones never end a completion
    sizes = [count_bucket(max(one.moves.shape[axis] for one in each)) for axis in (0, 1)]
    row_of = np.zeros((count, len(each[0].row_of)), np.int32)
    moves, complete = np.zeros((count, *sizes), np.int32), np.full(count, -1, np.int32)
    for place, one in enumerate(each):
        row_of[place] = one.row_of
        moves[place, : one.moves.shape[0], : one.moves.shape[1]] = one.moves
        complete[place] = one.moves.shape[1] - 1
    place_of = {identity: place for place, identity in enumerate(known)}
    chosen = [place_of.get(id(one.stop_texts), count - 1) for one in params]
    return np.array(chosen, np.int32), (row_of, moves, complete)
