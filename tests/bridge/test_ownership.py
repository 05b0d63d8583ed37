"""A server takes weights from one learner at a time; taking over is explicit."""

import itertools
import re

import pytest
from hypothesis import given, strategies as st

from jaxrl.bridge.base import LearnerIdentity, new_learner
from jaxrl.bridge.in_vllm.ownership import ForeignError, Ownership

A, B = new_learner("runs/a on host"), new_learner("runs/b on host")


def connect(ownership: Ownership, learner: LearnerIdentity) -> None:
    ownership.check(learner)
    ownership.take(learner)


def test_second_learner_is_refused() -> None:
    ownership = Ownership()
    connect(ownership, A)
    with pytest.raises(ForeignError, match=r"runs/a on host.*JAXRL_TAKE_OVER='runs/a on host'"):
        connect(ownership, B)
    ownership.require(A)
    with pytest.raises(ForeignError, match=rf"'runs/b on host', session {B.session}.*runs/a"):
        ownership.require(B)
    ownership.release()
    connect(ownership, B)
    with pytest.raises(ForeignError, match="runs/b"):
        ownership.require(A)


def test_taking_over_names_the_replaced_learner() -> None:
    ownership = Ownership()
    connect(ownership, A)
    with pytest.raises(ForeignError):
        connect(ownership, new_learner(B.name, replaces="runs/c on host"))
    taker = new_learner(B.name, replaces=A.name)
    connect(ownership, taker)
    connect(ownership, taker)  # it connects again after every failure
    with pytest.raises(ForeignError, match=re.escape("'runs/b on host' has taken the server over")):
        connect(ownership, A)


def test_resumed_run_replaces_its_earlier_process() -> None:
    ownership = Ownership()
    connect(ownership, A)
    resumed = new_learner(A.name)
    connect(ownership, resumed)
    for refuse in (connect, lambda o, a: o.require(a)):
        with pytest.raises(ForeignError):
            refuse(ownership, A)
    ownership.require(resumed)


def test_a_killed_process_that_connects_late_is_refused() -> None:
    """Its request was on its way when the run was started again, or replaced."""
    ownership, (killed, resumed) = Ownership(), (new_learner(A.name), new_learner(A.name))
    connect(ownership, resumed)
    with pytest.raises(ForeignError, match="taken the server over from this process"):
        connect(ownership, killed)
    earlier, taker = new_learner(A.name, replaces=B.name), new_learner(B.name, replaces=A.name)
    connect(ownership, taker)
    with pytest.raises(ForeignError, match="taken the server over from this process"):
        connect(ownership, earlier)
    connect(ownership, new_learner(A.name, replaces=B.name))


@given(st.lists(st.integers(0, 5), max_size=12))
def test_two_learners_never_take_turns(order: list[int]) -> None:
    """Whatever connects in whatever order, a learner that was replaced does not come back."""
    learners = [
        new_learner(name, replaces=other) for name, other in itertools.product("ab", ["", "a", "b"])
    ]
    ownership, held = Ownership(), []
    for learner in (learners[i] for i in order):
        try:
            connect(ownership, learner)
        except ForeignError:
            continue
        if held[-1:] != [learner]:
            held.append(learner)
    assert len(held) == len(set(held))
