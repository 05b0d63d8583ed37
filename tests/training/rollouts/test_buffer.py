"""The buffer between sampler and learner: bounded staleness, and counts that add up."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.core.batch import Rollout
from jaxrl.training.rollouts.buffer import Buffer, check_versions, staleness

BATCH, BATCHES = 3, 6


def group(
    number: int, *, version: int, equal: bool = False, newest: int | None = None
) -> list[Any]:
    return [
        Rollout(
            prompt=np.array([1], np.int32),
            completion=np.array([2, 3], np.int32),
            logprobs=np.zeros(2, np.float32),
            action_mask=np.ones(2, bool),
            version=np.array([version, version if newest is None else newest], np.int32),
            group=number,
            reward=0.0 if equal else float(i),
        )
        for i in range(2)
    ]


def numbers(batch: list[Rollout] | None) -> list[int]:
    assert batch is not None
    return [r.group for r in batch[::2]]


def filled(**changes: Any) -> Buffer:
    """A buffer with groups 0 to 3 of version 0, finished in the order 3, 1, 0, 2."""
    buffer = Buffer(**{"batch": 2, "batches": 4, "max_staleness": 1, **changes})
    assert buffer.begin(next_number=0, step=0, most=9) == [0, 1, 2, 3]
    for number in (3, 1, 0, 2):
        buffer.finish(number, group(number, version=0))
    return buffer


def test_groups_follow_start_or_finish_order():
    assert numbers(filled().take(step=0)) == [0, 1]
    assert numbers(filled(order="finished").take(step=0)) == [3, 1]


def test_learner_waits_for_groups_started_earlier():
    buffer = Buffer(batch=2, batches=4, max_staleness=1)
    buffer.begin(next_number=0, step=0, most=4)
    for number in (1, 2, 3):
        buffer.finish(number, group(number, version=0))
    assert buffer.take(step=0) is None
    buffer.finish(0, group(0, version=0))
    assert numbers(buffer.take(step=0)) == [0, 1]


def test_running_groups_resume_in_shorter_run():
    """Groups 1 to 3 wait, 0 is in flight, and one batch is left to train."""
    buffer = Buffer(batch=2, batches=1, max_staleness=1)
    buffer.restore([r for n in (1, 2, 3) for r in group(n, version=0)], [0])
    assert buffer.begin(next_number=4, step=0, most=9) == [0]
    buffer.finish(0, group(0, version=0))
    assert numbers(buffer.take(step=0)) == [0, 1]


def test_stale_groups_are_dropped_and_make_room():
    buffer = filled(order="finished")
    assert buffer.take(step=2) is None
    assert dataclasses.astuple(buffer.counts) == (4, 0, 4, 0)
    assert buffer.begin(next_number=4, step=2, most=9) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_dynamic_sampling_drops_zero_variance_groups():
    buffer = Buffer(batch=2, batches=4, max_staleness=2, zero_variance_per_batch=2)
    buffer.begin(next_number=0, step=0, most=6)
    for number in range(6):
        buffer.finish(number, group(number, version=0, equal=number != 1))
    # 0 and 2 are dropped, which is the bound; 3 is trained on as it is.
    assert numbers(buffer.take(step=0)) == [1, 3]
    assert buffer.take(step=1) is None  # 4 and 5 are dropped
    assert dataclasses.astuple(buffer.counts) == (6, 2, 0, 4)
    assert buffer.begin(next_number=6, step=1, most=9) == [6, 7, 8, 9, 10, 11]


def test_newer_policy_is_an_error():
    buffer = Buffer(batch=1, batches=1, max_staleness=1)
    buffer.begin(next_number=0, step=0, most=1)
    buffer.finish(0, group(0, version=0, newest=7))
    with pytest.raises(RuntimeError, match="version 7 and the learner is at 0"):
        buffer.take(step=0)


def test_staleness_is_that_of_the_oldest_token():
    assert staleness(group(0, version=3, newest=5), step=5) == [2, 2]


def test_versions_of_an_episodes_other_sequences_count():
    """The first turns of an episode may be in a sequence of their own, from an older policy."""
    first, second = group(0, version=4)
    (branch, _) = group(0, version=1)
    rollouts = [first, second._replace(branches=(branch,))]
    assert staleness(rollouts, step=5) == [1, 4]
    with pytest.raises(RuntimeError, match="tokens of policy version 1 and the learner is at 5"):
        check_versions(rollouts, step=5, oldest=2)
    buffer = Buffer(batch=1, batches=9, max_staleness=3)
    buffer.begin(next_number=0, step=5, most=1)
    buffer.finish(0, rollouts)
    assert buffer.take(step=5) is None
    assert buffer.counts.stale == 1


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from(["begun", "finished"]),
    st.integers(0, 2),
    st.integers(0, 2**32),
)
def test_staleness_is_bounded_and_counts_add_up(eta, order, extra_rounds, seed):
    """Any interleaving of threads, with a restart: the buffer is never overfull, no group is too
    stale, none is trained on twice, and a run of N batches starts N of them."""

    rng = random.Random(seed)

    def fresh(counts: Any = None) -> Buffer:
        return Buffer(
            batch=BATCH,
            batches=BATCHES,
            max_staleness=eta,
            order=order,
            zero_variance_per_batch=extra_rounds * BATCH,
            counts=counts,
        )

    buffer, step, position = fresh(), 0, 0
    running: dict[int, int] = {}  # number -> version that started it
    trained: list[int] = []
    restart_at = rng.randint(1, BATCHES)
    training = False  # between take and publish
    for _ in range(2000):
        if len(trained) == BATCH * BATCHES:
            break
        match rng.choice(["begin", "finish", "finish", "learner"]):
            case "begin":
                most = rng.randint(1, 2 * BATCH)
                for n in buffer.begin(next_number=position, step=step, most=most):
                    running[n], position = step, max(position, n + 1)
            case "finish" if running:
                n = rng.choice(sorted(running))
                equal = rng.random() < 0.3
                buffer.finish(n, group(n, version=running.pop(n), equal=equal))
            case "learner" if training:
                step, training = step + 1, False
                if step == restart_at:  # killed after the save, and resumed
                    waiting, again = buffer.waiting, buffer.running
                    assert again == sorted(running)
                    buffer = fresh(buffer.counts)
                    buffer.restore(waiting, again)
                    running = {}
            case "learner":
                batch = buffer.take(step=step)
                if batch is not None:
                    assert max(staleness(batch, step=step)) <= eta
                    trained += numbers(batch)
                    training = True
        c, waiting = buffer.counts, len(buffer.waiting) // 2
        assert c.sampled == c.trained + c.stale + c.zero_variance + waiting
        assert waiting + len(running) <= (eta + 1) * BATCH
        assert c.trained == len(trained)
    assert len(trained) == len(set(trained)) == BATCH * BATCHES
    if order == "begun":
        assert buffer.counts.stale == 0
        assert trained == sorted(trained)
