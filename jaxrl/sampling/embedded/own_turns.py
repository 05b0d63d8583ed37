"""Turns with settings and adapters of their own, decoded in one batch by one program."""

import dataclasses
from collections.abc import Mapping, Sequence
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
    """The settings of turns as arrays, from which the rows of a batch are taken. Turns are named by
    numbers.

    Sizes are powers of two, and what no turn needs is left out, so that few programs are compiled.
    """

    def __init__(
        self,
        turns: Mapping[int, OwnTurn],
        *,
        adapters: int,
        parts: int,
        before: "OwnTurns | None" = None,
    ) -> None:
        """Reads the settings of turns.

        Args:
          turns: by their numbers.
          adapters: number of stacked adapters.
          parts: number of devices that rows are divided over.
          before: settings of turns that were in progress before; no size is below theirs.
        """
        params = [one.params for one in turns.values()]
        self._place = {number: place for place, number in enumerate(turns)}
        each, known = [*turns.values()], None if before is None else before._rows
        chosen, texts = _texts(params, None if before is None else before.settings.stops.texts)
        self._rows = RowSettings(
            temperature=np.array([one.temperature for one in params], np.float32),
            truncation=_truncation(params, None if known is None else known.truncation),
            stops=_tables(params, (1, 1) if known is None else known.stops.shape[1:]),
            texts=chosen,
            adapters=_adapter_rows(each, adapters, parts, None if known is None else known.adapters)
            if adapters
            else None,
        )
        self._index = np.array([(t.prompt_index, t.sample_index) for t, *_ in each], np.int32)
        self._seeds = np.array([(one.seed % 2**32, one.seed // 2**32) for one in params], np.uint32)
        self.prefix = {n: (one.adapters, one.turn.context.tobytes()) for n, one in turns.items()}
        self.settings = DrawSettings(
            temperature=None,
            truncation=Truncation(),
            stops=Stops(np.zeros((0, self._rows.stops.shape[2]), np.int32), texts),
            record=False,
        )

    def rows(self, turns: Sequence[int | None], *, size: int) -> RowSettings:
        """Returns the settings of the turns with these numbers, for a batch of `size` rows; the
        last rows, and those of None, may have anyone's, but no adapter."""
        rows = jax.tree.map(lambda x: x[self._padded(turns, size)], self._rows)
        return dataclasses.replace(rows, adapters=self.adapters(turns, size=size))

    def adapters(self, turns: Sequence[int | None], *, size: int) -> AdapterRows | None:
        """Returns the adapters of the turns with these numbers, for a batch of `size` rows."""
        if self._rows.adapters is None:
            return None
        which = np.full(size, -1, np.int32)
        for row, number in enumerate(turns):
            if number is not None:
                which[row] = self._rows.adapters.which[self._place[number]]
        return dataclasses.replace(self._rows.adapters, which=which)

    def index(self, turns: Sequence[int]) -> np.ndarray:
        """Returns the prompt and sample indices that random numbers depend on, i32[n, 2]."""
        return self._index[self._padded(turns, len(turns))]

    def keys(self, turns: Sequence[int], *, size: int) -> jax.Array:
        """Returns the keys of the seeds of a batch's rows, key[size]."""
        return _keys(self._seeds[self._padded(turns, size)])

    def _padded(self, turns: Sequence[int | None], size: int) -> np.ndarray:
        places = [0 if number is None else self._place[number] for number in turns]
        return np.array([*places, *[0] * (size - len(places))], np.int32)


def _truncation(params: Sequence[SamplingParams], before: Truncation | None) -> Truncation:
    greedy = np.array([one.temperature == 0 for one in params])

    def setting(name: str, neutral: float, dtype: type) -> Any:
        values = np.array([getattr(one, name) for one in params], dtype)
        values = np.where(greedy, np.asarray(neutral, dtype), values)  # greedy ignores it
        known = before is not None and getattr(before, name) is not None
        return values if known or np.any(values != np.asarray(neutral, dtype)) else None

    return Truncation(
        min_p=setting("min_p", 0, np.float32),
        top_k=setting("top_k", 0, np.int32),
        top_p=setting("top_p", 1, np.float32),
    )


def _adapter_rows(
    turns: Sequence[OwnTurn], count: int, parts: int, before: AdapterRows | None
) -> AdapterRows:
    which = np.array([-1 if one.adapters is None else one.adapters for one in turns], np.int32)
    most = int(np.bincount(which + 1, minlength=count + 1)[1:].max())
    # Of equal shares, so that few programs are compiled: together they are no more than the batch.
    share = count_bucket(len(turns)) // count
    most = count_bucket(max(most, share))
    return AdapterRows(which, count, most if before is None else max(most, before.most), parts)


@jit_forward
def _keys(seeds: jax.Array) -> jax.Array:
    def one(seed: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])

    return jax.vmap(one)(jnp.asarray(seeds))


def _tables(params: Sequence[SamplingParams], least: tuple[int, int]) -> np.ndarray:
    """Returns the stop sequences of each turn, i32[N, M, S]; M and S are at least `least`, and S is
    not 0, since nothing would match everything."""
    found = [stop_table(one.stop) for one in params]
    longest = max(least[1], *(table.shape[1] for table in found))
    count = max(least[0], count_bucket(max(len(table) for table in found)))
    tables = np.full((len(found), count, longest), NEVER, np.int32)
    for mine, one in zip(tables, params, strict=True):
        # A sequence of wildcards in front makes all tables equally wide.
        table = stop_table((*one.stop, (NEVER,) * longest))[:-1]
        mine[: len(table)] = table
    return tables


def _texts(
    params: Sequence[SamplingParams], before: tuple[np.ndarray, ...] | None
) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
    """Returns the automaton of each turn, i32[N], and all of them: the rows of tokens i32[A, V],
    the moves i32[A, R, S] and the states of complete texts i32[A]; no size is below that of
    `before`. None without texts."""
    known: dict[int, StopTexts] = {id(t): t for p in params if (t := p.stop_texts) is not None}
    if not known and before is None:
        return None, None
    each, least = [*known.values()], (1, 1, 1) if before is None else before[1].shape
    vocabulary = before[0].shape[1] if before is not None else len(each[0].row_of)
    count = max(least[0], count_bucket(len(each) + 1))  # the last ones never end a completion
    sizes = [
        max(least[1 + axis], *[count_bucket(one.moves.shape[axis]) for one in each], 1)
        for axis in (0, 1)
    ]
    row_of = np.zeros((count, vocabulary), np.int32)
    moves, complete = np.zeros((count, *sizes), np.int32), np.full(count, -1, np.int32)
    for place, one in enumerate(each):
        row_of[place] = one.row_of
        moves[place, : one.moves.shape[0], : one.moves.shape[1]] = one.moves
        complete[place] = one.moves.shape[1] - 1
    place_of = {identity: place for place, identity in enumerate(known)}
    chosen = [place_of.get(id(one.stop_texts), count - 1) for one in params]
    return np.array(chosen, np.int32), (row_of, moves, complete)
