import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxrl.core.batch import Episode, Rollout
from jaxrl.diagnostics.completions import completion_metrics, distinct, identical


def rollout(ids, *, group=0, reward=0.0, logprob=-1.0):
    ids = np.array(ids, np.int32)
    return Rollout(
        prompt=np.array([1], np.int32),
        completion=ids,
        logprobs=np.full(len(ids), logprob, np.float32),
        action_mask=np.ones(len(ids), bool),
        version=np.zeros(len(ids), np.int32),
        group=group,
        reward=reward,
    )


def test_distinct_equals_a_count_by_hand():
    # 1 2 1 2 1: (1 2 1), (2 1 2), (1 2 1); and 1 2 1 once more.
    assert distinct([np.array([1, 2, 1, 2, 1])]) == pytest.approx(2 / 3)
    assert distinct([np.array([1, 2, 1, 2, 1]), np.array([1, 2, 1])]) == pytest.approx(2 / 4)
    assert distinct([np.array([7, 7]), np.array([7, 7]), np.array([7])]) == pytest.approx(2 / 3)
    assert distinct([np.array([], np.int32)]) == 1


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4))
def test_distinct_equals_its_definition(sequences):
    grams = []
    for ids in sequences:
        n = min(3, len(ids))
        grams += [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] if ids else []
    expected = len(set(grams)) / len(grams) if grams else 1
    assert distinct([np.array(ids, np.int32) for ids in sequences]) == pytest.approx(expected)


def test_identical_counts_twins_within_groups():
    a, b = np.array([1, 2]), np.array([1, 3])
    assert identical([[a, a, b, b], [a, b]]) == pytest.approx(4 / 6)
    assert identical([[a], [a]]) == 0


def test_diversity_separates_solved_from_collapsed():
    solved = [rollout([g, g + 1, g + 2, 50], group=g) for g in range(8) for _ in range(4)]
    hacked = [rollout([9, 9, 9, 9, 9, 9, 9, 9], group=g) for g in range(8) for _ in range(4)]
    found, lost = completion_metrics(solved), completion_metrics(hacked)
    assert found["diversity/distinct"] == 1
    assert lost["diversity/distinct"] == pytest.approx(1 / 48)
    assert found["diversity/identical"] == lost["diversity/identical"] == 1
    assert found["diversity/repetition"] == 0
    assert lost["diversity/repetition"] == pytest.approx(5 / 6)
    assert found["groups/sampled"] == 8


def test_repetition_is_measured_in_the_last_tokens():
    long = [*range(1000), *([5] * 256)]
    assert completion_metrics([rollout(long)])["diversity/repetition"] > 0.99
    assert completion_metrics([rollout(long[:1000])])["diversity/repetition"] == 0


def test_entropy_and_quantiles_ignore_nan():
    some = [rollout([1] * n, reward=float(n), logprob=-n) for n in (1, 2, 3)]
    unknown = rollout([1] * 4, reward=float("nan"), logprob=float("nan"))
    found = completion_metrics([*some, unknown])
    assert found["entropy/sampled"] == pytest.approx((1 + 2 * 2 + 3 * 3) / 6)
    assert (found["reward/min"], found["reward/p50"], found["reward/max"]) == (1, 2, 3)
    assert found["completion_length/max"] == 4
    assert "entropy/sampled" not in completion_metrics([unknown])
    assert "reward/min" not in completion_metrics([unknown])


def test_entropy_is_of_sampled_tokens_alone():
    """The output of a tool between two turns has no log-prob; a masked turn was sampled too."""
    logprobs = np.array([-1, 0, 0, 0, -2, -3], np.float32)
    episode = Episode(((0, 1, 0.0), (4, 6, 0.0)), "done", {})
    played = rollout(range(6))._replace(logprobs=logprobs, episode=episode)
    for mask in (logprobs < 0, np.zeros(6, bool)):
        found = completion_metrics([played._replace(action_mask=mask)])
        assert found["entropy/sampled"] == 2.0
    failed = rollout([])._replace(episode=Episode((), "error", {}))
    assert "entropy/sampled" not in completion_metrics([failed])
