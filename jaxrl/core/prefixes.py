"""Sequences that share prefixes, in a row: a tree in depth-first order.

The completions of a group begin with the same prompt, and prompts often with the same instructions.
A row writes such a prefix once (Prefix Grouper, arXiv:2506.05433). Each sequence leaves out the
prefix that it shares with the one before it, so G completions of R tokens after a prompt of P
tokens take P + G R + G - 1 tokens instead of G (P + R). Sorted by prompt, sequences share most.

Each sequence still writes the last token of its prompt, which scores the first token of the
completion. So the token before an action is always in the action's own segment, and only attention
has to know about shared prefixes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout


class Span(NamedTuple):
    """Place of a sequence in a row."""

    start: int  # index of its first token there
    skip: int  # number of its tokens that the row has already
    end: int  # index after its last token


def shared_prefix(before: Rollout, rollout: Rollout) -> int:
    """Counts the first tokens of a rollout's prompt that the rollout `before` it has written.

    They are equal in both prompts and, where experts are recorded, were routed alike. The last
    token of the prompt is never shared.
    """
    # The last token of the prompt scores the first of the completion: each sequence needs its own.
    length = min(len(before.prompt), len(rollout.prompt) - 1)
    length = _agreeing(before.prompt[:length], rollout.prompt[:length])
    if before.experts is None and rollout.experts is None:
        return length
    # A token that is written once has one routing: a recorded and an unknown one cannot share it.
    if before.experts is None or rollout.experts is None:
        return 0
    return _agreeing(before.experts[:length], rollout.experts[:length])


def _agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the first entries that agree in both arrays."""
    size = min(len(a), len(b))
    differs = np.any(a[:size] != b[:size], axis=tuple(range(1, a.ndim)))
    return int(differs.argmax()) if differs.any() else size


def group_by_prompt(rollouts: Sequence[Rollout], *, row_length: int) -> list[list[int]]:
    """Groups rollouts with the same prompt: indices by group, the longest rollout first. A group
    that does not fit into a row is divided, and all its parts but the last fill a row."""
    groups: dict[bytes, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        # Bytes, because arrays cannot be keys of a dict.
        groups.setdefault(np.asarray(rollout.prompt, np.int64).tobytes(), []).append(i)
    units: list[list[int]] = []
    for group in groups.values():
        # The longest first, so that the part left over is short and easy to place.
        longest_first = sorted(group, key=lambda i: -rollouts[i].length)
        units += cut(rollouts, longest_first, row_length=row_length)
    return units


def cut(rollouts: Sequence[Rollout], order: Sequence[int], *, row_length: int) -> list[list[int]]:
    """Cuts rollouts in this order into rows. A rollout longer than a row gets its own."""
    rows: list[list[int]] = []
    used = row_length
    for i in order:
        length = rollouts[i].length
        # The sequence before it has its whole prefix in the row, written or shared in turn.
        more = length - shared_prefix(rollouts[rows[-1][-1]], rollouts[i]) if rows else length
        if used + more > row_length:
            rows.append([i])
            used = length
        else:
            rows[-1].append(i)
            used += more
    return rows


def in_order(rollouts: Sequence[Rollout], units: Sequence[Sequence[int]]) -> list[int]:
    """Orders the groups of a row so that neighbours share the most tokens."""
    # In lexicographic order, prompts with the longest common beginning are neighbours.
    units = sorted(units, key=lambda unit: rollouts[unit[0]].prompt.tolist())
    return [i for unit in units for i in unit]


def seen_until(spans: Sequence[Span], *, row_length: int) -> np.ndarray:
    """Computes the index after the last token that sees each token of a row, i32[row_length].

    Token j sees token i if i <= j < seen_until[i]. A token is seen until the first later sequence
    that does not share it. Padding sees only itself.
    """
    until = np.arange(1, row_length + 1, dtype=np.int32)
    if not spans:
        return until
    lengths = (span.skip + span.end - span.start for span in spans)
    ends = np.full(max(lengths), spans[-1].end)  # by position in the sequence
    # Backwards: `ends[p]` is the start of the first later sequence that does not share the token
    # at position p.
    for span in reversed(spans):
        until[span.start : span.end] = ends[span.skip : span.skip + span.end - span.start]
        ends[span.skip :] = span.start
    return until
