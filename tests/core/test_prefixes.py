"""A row with shared prefixes holds every sequence: what its tokens see is the sequence."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.core.packing import SHARED, MinibatchShape, most_rows, pack_minibatch, plan_rows, unpack
from tests.core.test_packing import rollout

ROW = 16
quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)
SHAPE = MinibatchShape(row_length=ROW, rows_per_microbatch=1, align=SHARED)


def behind(prompt, completion, **changes):
    """A rollout with this prompt."""
    return rollout(1, completion, **changes)._replace(prompt=prompt)


def sharing(prompt, completion, *, seed):
    """A rollout with a prompt of few kinds of tokens, so that prompts share prefixes."""
    rng = np.random.default_rng(seed)
    return behind(rng.integers(1, 3, prompt), completion, seed=seed)


rollouts = st.lists(
    st.builds(sharing, st.integers(1, 8), st.integers(0, 8), seed=st.integers(0, 2**31)), max_size=8
)


@quick
@given(samples=rollouts)
def test_last_token_sees_its_sequence(samples):
    minibatch = pack_minibatch(samples, [i + 1.0 for i in range(len(samples))], shape=SHAPE)
    batch, index = minibatch.batch, np.arange(ROW)
    assert batch.seen_until is not None
    seen = (index[None, :] <= index[:, None]) & (
        index[:, None] < np.asarray(batch.seen_until)[:, None]
    )
    assert seen[:, index, index].all()
    tokens, positions, mask = map(np.asarray, (batch.tokens, batch.positions, batch.action_mask))
    segments = np.asarray(batch.segments)
    members = plan_rows(samples, SHAPE).members
    assert sorted(i for row in members for i in row) == list(range(len(samples)))
    for r, row in enumerate(members):
        for segment, i in enumerate(row, start=1):
            sample, own = samples[i], np.flatnonzero(segments[r] == segment)
            np.testing.assert_array_equal(own, np.arange(own[0], own[-1] + 1))
            path = np.flatnonzero(seen[r, own[-1]])
            whole = np.concatenate([sample.prompt, sample.completion])
            np.testing.assert_array_equal(tokens[r, path], whole)
            np.testing.assert_array_equal(positions[r, path], np.arange(sample.length))
            # The last token of the prompt, which scores the first action, is its own.
            assert len(own) > len(sample.completion)
            np.testing.assert_array_equal(mask[r, path[len(sample.prompt) :]], sample.action_mask)
        assert (seen[r, segments[r] == 0].sum(axis=1) == 1).all()
    found = unpack(np.asarray(batch.advantages), samples, shape=SHAPE)
    for i, (sample, advantages) in enumerate(zip(samples, found, strict=True)):
        np.testing.assert_array_equal(advantages, np.where(sample.action_mask, i + 1.0, 0))


@quick
@given(samples=rollouts)
def test_rows_stay_within_their_bound(samples):
    longest = max((sample.length for sample in samples), default=1)
    used = sum(bool(row) for row in plan_rows(samples, SHAPE).members)
    assert used <= most_rows(len(samples), longest=longest, row_length=ROW)


def test_a_group_takes_its_prompt_once():
    prompt = np.arange(1, 9)
    group = [behind(prompt, 3, seed=i) for i in range(4)]
    shape = dataclasses.replace(SHAPE, row_length=8 + 4 * 3 + 3)
    batch = pack_minibatch(group, [0.0] * 4, shape=shape).batch
    assert batch.tokens.shape[0] == 1
    assert (np.asarray(batch.segments) > 0).all()
    # A row with room for half of the group holds half of it.
    half = dataclasses.replace(SHAPE, row_length=8 + 2 * 3 + 1)
    assert [len(row) for row in plan_rows(group, half).members] == [2, 2]


def test_common_instructions_are_shared():
    prompts = [np.array([7, 7, 7, 7, n]) for n in (1, 2, 1, 2)]
    samples = [behind(prompt, 2, seed=i) for i, prompt in enumerate(prompts)]
    shape = dataclasses.replace(SHAPE, row_length=40)
    batch = pack_minibatch(samples, [0.0] * 4, shape=shape).batch
    assert np.count_nonzero(batch.segments) == 4 + 4 * (1 + 2)


def test_differently_routed_tokens_are_not_shared():
    prompt, experts = np.arange(1, 9), np.zeros((10, 1, 1), np.int16)
    other = experts.copy()
    other[3] = 1
    samples = [behind(prompt, 2, experts=e) for e in (experts, experts, other)]
    batch = pack_minibatch(samples, [0.0] * 3, shape=dataclasses.replace(SHAPE, row_length=40))
    assert np.count_nonzero(batch.batch.segments) == 10 + 3 + (10 - 3)


def test_sequence_longer_than_row_is_an_error():
    with pytest.raises(ValueError, match="has 17 tokens but a row holds 16"):
        plan_rows([rollout(8, 9)], SHAPE)


def test_groups_are_divided_only_to_save_rows():
    samples = [behind(np.full(4, g), 3, seed=i) for g in range(3) for i in range(4)]

    def groups(row_length):
        rows = plan_rows(samples, dataclasses.replace(SHAPE, row_length=row_length)).members
        return [[i // 4 for i in row] for row in rows]

    assert groups(4 + 4 * 3 + 3) == groups(29) == [[0] * 4, [1] * 4, [2] * 4]
    assert groups(30) == [[0] * 4 + [1] * 2, [1] * 2 + [2] * 4]
