"""Packs ragged rollouts into rows of a fixed length, and rows into the microbatches of a step.

`pack_minibatch` makes the input of an optimizer step, and `abstract_minibatch` describes it.
`unpack` maps per-token results back to rollouts.
"""

import dataclasses
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.batch import Minibatch, Rollout, TokenBatch
from jaxrl.core.kept import RECORD
from jaxrl.core.prefixes import Span, cut, group_by_prompt, in_order, seen_until, shared_prefix
from jaxrl.core.runs import bound_runs, most_sequences
from jaxrl.sharding.transfer import place

T = TypeVar("T", int, np.ndarray)


class Alignment(NamedTuple):
    """Layout of sequences within a row."""

    start: int  # sequences begin at multiples of this number of tokens
    block: int  # a sequence that would cross a multiple of this begins at one
    shared: bool = False  # prefixes that prompts share are written once, see `prefixes`

    def begin(self, free: T, length: int) -> T:
        """Returns the first place for a sequence in a row that is free from `free` on; of several
        rows, if `free` is an array."""
        if self.start == 1 and self.block == ANYWHERE.block:
            return free  # divisions of all rows, for each sequence, would take most of the time
        begin = -(-free // self.start) * self.start
        crosses = begin // self.block != (begin + length - 1) // self.block
        return begin + crosses * (-begin % self.block)


ANYWHERE = Alignment(start=1, block=2**62)
SHARED = ANYWHERE._replace(shared=True)
"""A layout in which the completions of a group share one copy of their prompt."""


def most_rows(sequences: int, *, longest: int, row_length: int) -> int:
    """Bounds the rows that first-fit packing uses for sequences of at most `longest` tokens. All
    rows but one are more than half full."""
    return min(sequences, 2 * sequences * longest // row_length + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinibatchShape:
    """Shape of the minibatches of one compiled step.

    There is room for `max_rows`, rounded up to whole microbatches. With one row per sequence the
    step compiles once; None makes room for the rows in use only.
    """

    row_length: int  # in tokens
    rows_per_microbatch: int  # computed at once
    max_rows: int | None = None
    packed: bool = True  # sequences share a row where they fit; otherwise each has its own
    align: Alignment = ANYWHERE
    together: int = 1  # consecutive rollouts that always share a row: 2 for pairs, if not `shared`
    sharding: Any = None  # of arrays [rows, tokens]; None for the default device
    # Bound the runs of each minibatch (`Runs`), for kernels that reserve memory for each run. The
    # step then compiles once for each pair of bounds.
    bound_runs: bool = False

    def microbatches(self, rows: int) -> int:
        """Counts the microbatches that this number of rows fills, at least one."""
        return max(1, -(-rows // self.rows_per_microbatch))


class Rows(NamedTuple):
    """Rollouts by row."""

    members: list[Sequence[int]]  # indices of the rollouts of each row; empty rows are padding
    microbatches: int  # in use


def pack_minibatch(
    rollouts: Sequence[Rollout],
    advantages: Sequence[np.ndarray | float],
    *,
    shape: MinibatchShape,
    values: Sequence[np.ndarray] | None = None,
    returns: Sequence[np.ndarray] | None = None,
) -> Minibatch:
    """Packs rollouts into a minibatch on the devices; see `pack` and `plan_rows`."""
    rows = plan_rows(rollouts, shape)
    batch = pack(
        rollouts,
        advantages,
        values=values,
        returns=returns,
        rows=rows.members,
        row_length=shape.row_length,
        align=shape.align,
    )
    if shape.bound_runs:
        batch = dataclasses.replace(batch, runs=bound_runs(np.asarray(batch.segments)))
    return Minibatch(
        batch=place(batch, shape.sharding),
        microbatches=jnp.int32(rows.microbatches),
        rows_per_microbatch=shape.rows_per_microbatch,
    )


def abstract_minibatch(
    shape: MinibatchShape,
    *,
    critic: bool = False,
    scores: Collection[str] = (),
    coefficients: Collection[str] = (),
    experts: tuple[int, int] | None = None,
    kept: bool = False,
) -> Minibatch:
    """Describes the minibatches of a shape: their arrays' shapes, dtypes and shardings.

    Args:
      shape: a shape with `max_rows`.
      critic: True if the batch has a critic's values and returns.
      scores: "anchor", "reference", both or neither.
      coefficients: names of the terms that controllers steer.
      experts: (routed layers, experts per token) if the batch records experts.
      kept: True if the batch records the tokens that truncated sampling kept.

    Raises:
      ValueError: if the shape does not bound its rows.
    """
    if shape.max_rows is None:
        raise ValueError("max_rows=None: rows without a bound have no shape; give max_rows")
    rows = shape.microbatches(shape.max_rows) * shape.rows_per_microbatch
    targets = ("values", "returns") if critic else ()

    def described(array: _Array) -> Any:
        whole = (rows, shape.row_length, *array.more)
        return jax.ShapeDtypeStruct(whole, array.dtype, sharding=shape.sharding)

    more: Any = {"shared": shape.align.shared, "experts": experts, "kept": kept}
    arrays: dict[str, Any] = {n: described(a) for n, a in _arrays(targets, **more).items()}
    score: Any = described(_SCORE)
    used: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return Minibatch(
        batch=TokenBatch(**arrays, coefficients=dict.fromkeys(coefficients, score) or None),
        microbatches=used,
        rows_per_microbatch=shape.rows_per_microbatch,
        **dict.fromkeys(scores, score),
    )


def unpack(
    array: np.ndarray, rollouts: Sequence[Rollout], *, shape: MinibatchShape
) -> list[np.ndarray]:
    """Inverts `pack_minibatch`: returns the part of an array [N, T, ...] that belongs to each
    rollout's completion, [C, ...]."""
    found: dict[int, np.ndarray] = {}
    for r, members in enumerate(plan_rows(rollouts, shape).members):
        for i, span in zip(members, _spans(rollouts, members, shape.align), strict=True):
            found[i] = array[r, span.end - len(rollouts[i].completion) : span.end]
    return [found[i] for i in range(len(rollouts))]


def plan_rows(rollouts: Sequence[Rollout], shape: MinibatchShape) -> Rows:
    """Assigns rollouts to the rows of a minibatch. Deterministic.

    The compiled step divides its batch with a stride (row i belongs to microbatch i mod n), which
    spreads each microbatch evenly over the devices that hold the rows. Rows are placed so that the
    step can stop after the last microbatch in use.

    Raises:
      ValueError: if a sequence is longer than a row, or the rows exceed `max_rows`.
    """
    shared, per = shape.align.shared and shape.packed, shape.rows_per_microbatch
    rows = _shared_rows(rollouts, shape) if shared else _plain_rows(rollouts, shape)
    room = len(rows) if shape.max_rows is None else shape.max_rows
    used, microbatches = (shape.microbatches(n) for n in (len(rows), room))
    if used > microbatches:
        raise ValueError(
            f"{len(rows)} rows fill {used} microbatches of {per} rows, but the batch has room for "
            f"{microbatches}; raise max_rows"
        )
    # Deal row by row over the microbatches in use, so that all are about equally full.
    placed: list[Sequence[int]] = [()] * (per * microbatches)
    for i, row in enumerate(rows):
        placed[(i % used) + (i // used) * microbatches] = row
    return Rows(placed, used)


def _plain_rows(rollouts: Sequence[Rollout], shape: MinibatchShape) -> list[list[int]]:
    size, length = shape.together, shape.row_length
    units = [list(range(i, i + size)) for i in range(0, len(rollouts), size)]
    if not shape.packed:
        return units
    rows = assign_rows(
        [_spans(rollouts, unit, shape.align)[-1].end for unit in units],
        row_length=length,
        align=shape.align,
        most=most_sequences(length) // size,
    )
    return [list(chain.from_iterable(units[u] for u in row)) for row in rows]


def _shared_rows(rollouts: Sequence[Rollout], shape: MinibatchShape) -> list[list[int]]:
    """Keeps the rollouts of a prompt in one row, unless dividing them takes fewer rows."""
    length = shape.row_length
    units = group_by_prompt(rollouts, row_length=length)
    sizes = [_spans(rollouts, unit, shape.align)[-1].end for unit in units]
    rows = assign_rows(sizes, row_length=length)
    whole = [in_order(rollouts, [units[u] for u in row]) for row in rows]
    return min(whole, cut(rollouts, in_order(rollouts, units), row_length=length), key=len)


def _spans(rollouts: Sequence[Rollout], members: Sequence[int], align: Alignment) -> list[Span]:
    """Returns the places of the sequences of a row."""
    spans: list[Span] = []
    for n, i in enumerate(members):
        shared = align.shared and n > 0
        skip = shared_prefix(rollouts[members[n - 1]], rollouts[i]) if shared else 0
        begin = align.begin(spans[-1].end if spans else 0, rollouts[i].length - skip)
        spans.append(Span(begin, skip, begin + rollouts[i].length - skip))
    return spans


def assign_rows(
    lengths: Sequence[int], *, row_length: int, align: Alignment = ANYWHERE, most: int | None = None
) -> list[list[int]]:
    """Packs sequences into rows by first-fit decreasing: returns each row's indices, at most `most`
    of them. Deterministic: ties keep the given order.

    Raises:
      ValueError: if a sequence is longer than a row; the message names it.
    """
    rows: list[list[int]] = []
    free = np.zeros(len(lengths), np.int64)  # where the free part of each row begins
    held = np.zeros(len(lengths), np.int64)  # sequences of each row
    limit = len(lengths) if most is None else most
    # The longest first: short sequences then fill the gaps, not the other way round.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > row_length:
            raise ValueError(
                f"sequence {i} has {lengths[i]} tokens but a row holds {row_length}; raise "
                "the row length or shorten prompts and completions"
            )
        ends = align.begin(free[: len(rows)], lengths[i]) + lengths[i]
        fits = (ends <= row_length) & (held[: len(rows)] < limit)
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        free[row] = align.begin(int(free[row]), lengths[i]) + lengths[i]
        held[row] += 1
    return rows


def pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[np.ndarray | float],
    *,
    values: Sequence[np.ndarray] | None = None,
    returns: Sequence[np.ndarray] | None = None,
    rows: Sequence[Sequence[int]],
    row_length: int,
    align: Alignment = ANYWHERE,
) -> TokenBatch:
    """Writes rollouts into a TokenBatch of numpy arrays.

    Args:
      rollouts: the samples.
      advantages: for each rollout one number, or f32[C] for its completion tokens.
      values: for each rollout f32[C], of a critic; None without one.
      returns: for each rollout f32[C], the critic's targets; None without one.
      rows: for each row of the result the indices of its rollouts, in order; an empty row is all
        padding. See `assign_rows`.
      row_length: tokens in a row.
      align: layout within a row.

    Raises:
      ValueError: if a rollout has no prompt (its first token could not be scored) or arrays of
        different lengths, if a row is too short for its rollouts, or if there is not one advantage
        per rollout.
    """
    if len(advantages) != len(rollouts):
        raise ValueError(
            f"{len(advantages)} advantages for {len(rollouts)} rollouts; give one for each"
        )
    kept = any(r.kept is not None for r in rollouts)
    for r, members in enumerate(rows):
        used = max((span.end for span in _spans(rollouts, members, align)), default=0)
        if used > row_length:
            raise ValueError(f"row {r} is given {used} tokens but holds only {row_length}")
        for i in members:
            _check_rollout(rollouts[i], index=i, kept=kept)
    targets: dict[str, Any] = {"values": values, "returns": returns}
    targets = {name: found for name, found in targets.items() if found is not None}
    given = targets | {
        "advantages": advantages,
        "sampler_logprobs": [rollout.logprobs for rollout in rollouts],
        # A reward that failed is NaN. No term may see it, not even times a mask of 0.
        "rewards": np.nan_to_num([rollout.reward for rollout in rollouts]),
    }
    sent = next((r.experts.shape[1:] for r in rollouts if r.experts is not None), None)
    arrays: dict[str, Any] = {
        name: np.full((len(rows), row_length, *array.more), array.fill, array.dtype)
        for name, array in _arrays(targets, shared=align.shared, experts=sent, kept=kept).items()
    }
    for r, members in enumerate(rows):
        spans = _spans(rollouts, members, align)
        for segment, (i, span) in enumerate(zip(members, spans, strict=True), start=1):
            rollout, whole = rollouts[i], slice(span.start, span.end)
            completion = slice(span.end - len(rollout.completion), span.end)
            tokens = np.concatenate([rollout.prompt, rollout.completion])
            arrays["tokens"][r, whole] = tokens[span.skip :]
            arrays["segments"][r, whole] = segment
            arrays["positions"][r, whole] = np.arange(span.skip, rollout.length)
            arrays["action_mask"][r, completion] = rollout.action_mask
            for name, of_rollouts in given.items():
                # 0 where the policy did not choose: 0 x NaN must not reach a gradient.
                arrays[name][r, completion] = np.where(rollout.action_mask, of_rollouts[i], 0)
            if rollout.kept is not None:
                arrays["kept"][r, completion] = rollout.kept
            if rollout.experts is not None:
                recorded = rollout.experts[span.skip :]
                arrays["experts"][r, span.start : span.start + len(recorded)] = recorded
        if align.shared:
            arrays["seen_until"][r] = seen_until(spans, row_length=row_length)
    return TokenBatch(**arrays)  # numpy until it is on devices


class _Array(NamedTuple):
    """An array [N, T, ...] of a batch."""

    dtype: Any
    fill: int = 0  # where no token is
    more: tuple[int, ...] = ()  # dimensions after the first two


_INDEX, _SCORE = _Array(np.int32), _Array(np.float32)


def _arrays(
    targets: Collection[str], *, shared: bool, experts: tuple[int, ...] | None, kept: bool
) -> dict[str, _Array]:
    """Lists the arrays of a packed batch, with the critic's `targets`."""
    scores = ("sampler_logprobs", "advantages", "rewards", *targets)
    arrays = dict.fromkeys(("tokens", "segments", "positions"), _INDEX)
    arrays |= {"action_mask": _Array(np.bool_)} | dict.fromkeys(scores, _SCORE)
    if shared:
        arrays["seen_until"] = _INDEX
    if experts is not None:
        # -1: not reported by the sampler, so the learner routes the token itself.
        arrays["experts"] = _Array(np.int16, -1, experts)
    if kept:
        arrays["kept"] = _Array(np.uint8, 0, (RECORD,))
    return arrays


def _check_rollout(rollout: Rollout, *, index: int, kept: bool) -> None:
    if not len(rollout.prompt):
        raise ValueError(f"rollout {index} has an empty prompt: begin it with a BOS or EOS token")
    for name in ("logprobs", "action_mask", "version"):
        if len(getattr(rollout, name)) != len(rollout.completion):
            raise ValueError(
                f"rollout {index}: {name} has {len(getattr(rollout, name))} entries for "
                f"{len(rollout.completion)} completion tokens"
            )
    if kept and rollout.kept is None and rollout.action_mask.any():
        raise ValueError(
            f"rollout {index}: kept is None, but others of the minibatch record the tokens that "
            "truncated sampling kept; sample all of them with a sampler that records them"
        )
    if rollout.experts is not None and len(rollout.experts) > rollout.length:
        raise ValueError(
            f"rollout {index}: experts has {len(rollout.experts)} entries for {rollout.length} "
            "tokens of prompt and completion"
        )
