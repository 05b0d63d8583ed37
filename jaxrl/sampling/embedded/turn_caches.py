"""Caches of ended turns, from which the next turns of their episodes continue."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.models.spec import Params
from jaxrl.sampling.base import Turn, TurnCache
from jaxrl.sampling.embedded.cache import Cache


class KeptPrefix(NamedTuple):
    """The content of a `TurnCache`: the first tokens of a sequence, already in a cache."""

    weights: Params  # that computed them
    tokens: np.ndarray  # i32[P]
    cache: Cache
    row: int  # of the cache

    def begins(self, context: np.ndarray, *, weights: Params) -> bool:
        """Returns True if the context continues these tokens under the same weights and is at most
        twice as long; a longer one is computed faster from its first token."""
        count = len(self.tokens)
        fits = weights is self.weights and count < len(context) <= 2 * count
        return fits and np.array_equal(self.tokens, context[:count])


class Queued(NamedTuple):
    """A turn that waits for a row."""

    turn: Turn
    prefix: KeptPrefix | None


def take_prefix(turn: Turn, weights: Params) -> KeptPrefix | None:
    """Empties the turn's cache; returns the content, or None if the turn cannot begin with it."""
    if turn.cache is None:
        return None
    kept, turn.cache.content = turn.cache.content, None
    same = isinstance(kept, KeptPrefix) and kept.begins(turn.context, weights=weights)
    return kept if same else None


def by_array(queued: Sequence[Queued]) -> list[Queued]:
    """Returns the turns that begin with a prefix, grouped by cache: a batch then uses few caches,
    and each is freed as early as possible."""
    of_cache: dict[int, list[Queued]] = {}
    for one in queued:
        if one.prefix is not None:
            of_cache.setdefault(id(one.prefix.cache), []).append(one)
    return [one for group in of_cache.values() for one in group]


class EndedRows:
    """Ended rows of a batch, until their arrays are kept or reused."""

    def __init__(self, weights: Params, *, rows: int) -> None:
        """Begins a request whose batches keep at most `rows` rows in all."""
        self._weights, self._left = weights, rows
        self._ended: dict[int, tuple[TurnCache, np.ndarray]] = {}

    def add(self, row: int, turn: Turn, completion: np.ndarray) -> None:
        """Records that a row holds a turn's context and its completion, i32[C], except for the last
        token, which was not run through the model."""
        if turn.cache is not None:
            tokens = np.concatenate([turn.context, completion[:-1]])
            self._ended[row] = turn.cache, tokens

    def drop(self, rows: list[int]) -> None:
        """Forgets rows that other completions take."""
        for row in rows:
            self._ended.pop(row, None)

    def keep(self, cache: Cache) -> None:
        """Gives the rows of a finished cache to their episodes."""
        if self._ended and cache.rows <= self._left:
            self._left -= cache.rows
            for row, (kept, tokens) in self._ended.items():
                kept.content = KeptPrefix(self._weights, tokens, cache, row)
        self._ended.clear()
