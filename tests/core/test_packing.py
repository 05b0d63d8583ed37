"""Packing keeps every token exactly once; counts over sequences see through the packing."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.core.batch import Rollout, action_sequences, action_tokens, segment_sum, sequence_weights
from jaxrl.core.packing import (
    Alignment,
    MinibatchShape,
    assign_rows,
    pack,
    pack_minibatch,
    plan_rows,
    unpack,
)
from jaxrl.core.runs import Runs

ROW = 12
quick = settings(max_examples=40, derandomize=True, deadline=None, database=None)


def rollout(prompt, completion, *, seed=0, **changes):
    rng = np.random.default_rng(seed)
    fields = {
        "prompt": rng.integers(1, 1000, prompt),
        "completion": rng.integers(1, 1000, completion),
        "logprobs": -rng.random(completion).astype(np.float32),
        "action_mask": rng.random(completion) < 0.7,
        "version": np.zeros(completion, np.int32),
        "group": 0,
    }
    return Rollout(**fields | changes)


rollouts = st.lists(
    st.builds(rollout, st.integers(1, 4), st.integers(0, 8), seed=st.integers(0, 2**31)), max_size=8
)


@quick
@given(st.lists(st.integers(0, ROW), max_size=30))
def test_assign_rows_places_each_once_within_capacity(lengths):
    rows = assign_rows(lengths, row_length=ROW)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert all(n <= ROW for n in used)
    assert rows == assign_rows(lengths, row_length=ROW)
    # First fit opens a row only for what fits in none before: two half-empty rows cannot coexist.
    assert sum(2 * n <= ROW for n in used) <= 1


def test_assign_rows_keeps_the_order_of_ties():
    assert assign_rows([6, 6, 6, 6], row_length=12) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sequence 1 has 13 tokens but a row holds 12"):
        assign_rows([1, 13], row_length=12)


@quick
@given(
    st.lists(st.integers(1, ROW), max_size=30),
    st.sampled_from([(1, 2**62), (2, 4), (3, 6), (1, 5)]),
    st.integers(1, 4),
)
def test_assign_rows_takes_the_first_row_with_room(lengths, places, most):
    align = Alignment(*places)
    rows = assign_rows(lengths, row_length=ROW, align=align, most=most)
    ends: list[list[int]] = []  # of the sequences of each row
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tried = [align.begin(row[-1], lengths[i]) + lengths[i] for row in ends]
        room = [end <= ROW and len(row) < most for end, row in zip(tried, ends, strict=True)]
        row = room.index(True) if any(room) else len(ends)
        assert i in rows[row]
        ends = ends if any(room) else [*ends, []]
        ends[row].append(tried[row] if any(room) else lengths[i])


@quick
@given(samples=rollouts, spare=st.integers(0, 2))
def test_pack_writes_every_token_once(samples, spare):
    advantages = [np.full(len(s.completion), i + 1.0) for i, s in enumerate(samples)]
    rows = [*assign_rows([s.length for s in samples], row_length=ROW), *[[]] * spare]
    batch = pack(samples, advantages, rows=rows, row_length=ROW)
    assert batch.tokens.shape == (len(rows), ROW)
    read = np.zeros(batch.tokens.shape, bool)
    for r, members in enumerate(rows):
        for segment, i in enumerate(members, start=1):
            at, sample = batch.segments[r] == segment, samples[i]
            read[r] |= at
            blank, mask = np.zeros(len(sample.prompt)), sample.action_mask
            chosen = {
                "tokens": np.concatenate([sample.prompt, sample.completion]),
                "positions": np.arange(sample.length),
                "action_mask": np.concatenate([blank, mask]),
                "sampler_logprobs": np.concatenate([blank, np.where(mask, sample.logprobs, 0)]),
                "advantages": np.concatenate([blank, np.where(mask, i + 1.0, 0)]),
            }
            for name, expected in chosen.items():
                np.testing.assert_array_equal(getattr(batch, name)[r, at], expected, err_msg=name)
    for leaf in jax.tree.leaves(batch):
        assert not leaf[~read].any()  # padding is blank


def test_pack_broadcasts_one_advantage_over_a_completion():
    sample = rollout(2, 3, action_mask=np.array([True, False, True]))
    batch = pack([sample], [2.5], rows=[[0]], row_length=6)
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 2.5, 0, 2.5, 0]])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (rollout(0, 3), "rollout 0 has an empty prompt"),
        (rollout(2, 3, action_mask=np.ones(1, bool)), "action_mask has 1 entries for 3 completion"),
        (rollout(2, 3, logprobs=np.ones(2)), "logprobs has 2 entries"),
        (rollout(2, 3, version=np.ones(4, int)), "version has 4 entries"),
        (rollout(2, 9), "row 0 is given 11 tokens but holds only 10"),
    ],
)
def test_pack_refuses_malformed_rollouts(sample, message):
    with pytest.raises(ValueError, match=message):
        pack([sample], [1.0], rows=[[0]], row_length=10)


def test_pack_needs_one_advantage_per_rollout():
    with pytest.raises(ValueError, match="2 advantages for 1 rollouts"):
        pack([rollout(1, 1)], [1.0, 1.0], rows=[[0]], row_length=4)


counts = jax.jit(
    lambda batch: (
        action_tokens(batch),
        action_sequences(batch),
        sequence_weights(batch),
        segment_sum(batch.advantages, batch.segments),
    )
)


@quick
@given(samples=rollouts)
def test_counts_do_not_depend_on_packing(samples):
    rows = assign_rows([s.length for s in samples], row_length=ROW)
    rows = [*rows, *[[]] * (9 - len(rows))]
    batch = pack(samples, [i + 1.0 for i in range(len(samples))], rows=rows, row_length=ROW)
    tokens, sequences, weights, sums = jax.device_get(counts(batch))
    chosen = [int(s.action_mask.sum()) for s in samples]
    assert tokens == sum(chosen)
    assert sequences == sum(n > 0 for n in chosen)
    np.testing.assert_allclose(weights.sum(), sequences, rtol=1e-6)
    assert not weights[~batch.action_mask].any()
    for r, members in enumerate(rows):
        for segment, i in enumerate(members, start=1):
            at = batch.segments[r] == segment
            np.testing.assert_array_equal(sums[r, at], (i + 1.0) * chosen[i])
            np.testing.assert_allclose(
                weights[r, at & batch.action_mask[r]] * chosen[i], 1, rtol=1e-6
            )
    assert not sums[batch.segments == 0].any()


@quick
@given(samples=rollouts, packed=st.booleans(), per=st.integers(1, 3), spare=st.integers(0, 2))
def test_unpack_inverts_pack_minibatch(samples, packed, per, spare):
    shape = MinibatchShape(
        row_length=ROW,
        rows_per_microbatch=per,
        max_rows=len(samples) + spare if spare else None,
        packed=packed,
    )
    given = [100.0 * i + np.arange(len(s.completion)) + 1 for i, s in enumerate(samples)]
    minibatch = pack_minibatch(samples, given, shape=shape)
    assert len(minibatch.batch.tokens) % per == 0
    found = unpack(np.asarray(minibatch.batch.advantages), samples, shape=shape)
    for sample, advantages, expected in zip(samples, found, given, strict=True):
        np.testing.assert_array_equal(advantages, np.where(sample.action_mask, expected, 0))


@quick
@given(st.lists(st.integers(1, 3), min_size=2, max_size=8), st.booleans())
def test_sequences_kept_together_share_a_row(lengths, packed):
    samples = [rollout(n, n) for n in lengths[: len(lengths) // 2 * 2]]
    shape = MinibatchShape(row_length=ROW, rows_per_microbatch=2, packed=packed, together=2)
    rows = plan_rows(samples, shape).members
    pairs = [list(row[i : i + 2]) for row in rows for i in range(0, len(row), 2)]
    assert sorted(pairs) == [[i, i + 1] for i in range(0, len(samples), 2)]


def test_more_rows_than_room_is_an_error():
    shape = MinibatchShape(row_length=ROW, rows_per_microbatch=2, max_rows=2, packed=False)
    with pytest.raises(ValueError, match="3 rows fill 2 microbatches of 2 rows"):
        plan_rows([rollout(1, 1)] * 3, shape)


def test_minibatches_bound_their_runs_where_kernels_need_it():
    shape = MinibatchShape(row_length=1024, rows_per_microbatch=1)
    samples = [rollout(4, n) for n in (150, 100, 200, 3, 3, 3)]
    assert pack_minibatch(samples, [0.0] * 6, shape=shape).batch.runs is None
    bounded = dataclasses.replace(shape, bound_runs=True)
    # Six sequences in a row, and padding, which lies in three pieces of 256 tokens.
    assert pack_minibatch(samples, [0.0] * 6, shape=bounded).batch.runs == Runs(16, 256)
