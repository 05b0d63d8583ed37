"""The buffer between sampler and learner: admission of new groups, and order of training.

It has no threads or locks; `jaxrl.training.rollouts.stream` has.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from jaxrl.config.sampler import Order
from jaxrl.core import Rollout, by_group
from jaxrl.training.rollouts import dynamic_sampling


@dataclasses.dataclass
class Counts:
    """Groups since the start of a run: sampled = trained + stale + zero_variance + waiting."""

    sampled: int = 0  # completed and scored
    trained: int = 0  # handed to the learner
    stale: int = 0  # dropped because their policy was too old
    zero_variance: int = 0  # dropped by dynamic sampling because their rewards were equal


class _Group(NamedTuple):
    """A group that waits, with what each look at the buffer asks of it."""

    rollouts: list[Rollout]
    oldest: int  # of the versions of its tokens
    newest: int
    informative: bool  # see `dynamic_sampling`

    @classmethod
    def of(cls, rollouts: list[Rollout]) -> Self:
        never = np.iinfo(np.int32).max  # without tokens, as in an episode that could not begin
        versions = [_versions(rollout) for rollout in rollouts]
        oldest = min(int(found.min(initial=never)) for found in versions)
        newest = max(int(found.max(initial=0)) for found in versions)
        return cls(rollouts, oldest, newest, bool(dynamic_sampling.informative(rollouts)))


class Buffer:
    """Groups of rollouts between the sampler and the learner.

    Admission follows AReaL (arXiv:2505.24298): up to the learner's version v at most
    `(max_staleness + v + 1) * batch` groups are started, not counting dropped ones. The learner
    trains on `batch` groups per version, so each group is trained on at most `max_staleness`
    versions after the policy that started it. With order "begun" the count alone ensures this; with
    order "finished" older groups are dropped.
    """

    def __init__(
        self,
        *,
        batch: int,
        batches: int,
        max_staleness: int,
        order: Order = "begun",
        zero_variance_per_batch: int = 0,
        counts: Counts | None = None,
    ) -> None:
        """Creates an empty buffer for `batches` batches of groups. Of each batch, up to
        `zero_variance_per_batch` further groups with equal rewards may be dropped."""
        self.counts = counts or Counts()
        self._batch, self._batches, self._max_staleness = batch, batches, max_staleness
        self._order = order
        self._zero_variance_per_batch = self._zero_variance_left = zero_variance_per_batch
        self._again: deque[int] = deque()
        self._running: set[int] = set()
        self._waiting: dict[int, _Group] = {}  # in the order in which they finished

    @property
    def running(self) -> list[int]:
        """Numbers of the groups that are being sampled or are to be sampled again."""
        return sorted({*self._running, *self._again})

    @property
    def waiting(self) -> list[Rollout]:
        """Rollouts that wait for the learner, group by group."""
        return [r for group in self._waiting.values() for r in group.rollouts]

    def restore(self, rollouts: Iterable[Rollout], running: Iterable[int]) -> None:
        """Restores `waiting` and `running`; running groups are sampled again before new ones."""
        self._waiting = {n: _Group.of(group) for n, group in by_group(rollouts).items()}
        self._again = deque(running)

    def begin(self, *, next_number: int, step: int, most: int) -> list[int]:
        """Admits up to `most` groups at the learner's version `step`; none if the buffer is full.

        Groups that were running at the checkpoint come first and are always admitted. Groups that
        were never started are numbered from `next_number` on.
        """
        again = [self._again.popleft() for _ in range(min(most, len(self._again)))]
        self._running.update(again)
        held = self.counts.trained + len(self._waiting) + len(self._running)
        free = min(self._max_staleness + step + 1, self._batches) * self._batch - held
        new = range(next_number, next_number + max(0, min(free, most - len(again))))
        self._running.update(new)
        return [*again, *new]

    def finish(self, number: int, rollouts: list[Rollout]) -> None:
        """Stores a group with its rewards until the learner takes it."""
        self._running.remove(number)
        self._waiting[number] = _Group.of(rollouts)
        self.counts.sampled += 1

    def take(self, *, step: int) -> list[Rollout] | None:
        """Takes the rollouts of a batch of groups for training at version `step`; None until there
        are enough. Stale groups are dropped first, even if it returns None.

        Raises:
          RuntimeError: for a group that was sampled by a policy newer than the learner's.
        """
        self._drop_stale(step=step)
        if len(self._waiting) < self._batch and not self._zero_variance_left:
            return None
        chosen: list[int] = []
        for number in self._next():
            if self._zero_variance_left and not self._waiting[number].informative:
                self._zero_variance_left -= 1
                self.counts.zero_variance += 1
                del self._waiting[number]
                continue
            chosen.append(number)
            if len(chosen) == self._batch:
                self._zero_variance_left = self._zero_variance_per_batch
                self.counts.trained += len(chosen)
                return [r for n in chosen for r in self._waiting.pop(n).rollouts]
        return None

    def _next(self) -> list[int]:
        """Returns the numbers of the groups that may be trained on, in their order."""
        if self._order == "finished":
            return list(self._waiting)
        first = min(self.running, default=float("inf"))
        return sorted(number for number in self._waiting if number < first)

    def _drop_stale(self, *, step: int) -> None:
        for number, group in list(self._waiting.items()):
            if group.newest > step:
                check_versions(group.rollouts, step=step)
            if step - group.oldest > self._max_staleness:
                self.counts.stale += 1
                del self._waiting[number]


def staleness(rollouts: Iterable[Rollout], *, step: int) -> list[int]:
    """Returns the number of versions that the oldest token of each rollout is behind `step`; 0
    without tokens, as in an episode that could not begin."""
    return [step - int(_versions(r).min(initial=step)) for r in rollouts]


def _versions(rollout: Rollout) -> np.ndarray:
    """Returns the versions of all tokens of an episode, i32[N]."""
    return np.concatenate([rollout.version, *(branch.version for branch in rollout.branches)])


def check_versions(rollouts: Iterable[Rollout], *, step: int, oldest: int = 0) -> None:
    """Checks that every token was sampled by a policy version from `oldest` to `step`, the
    learner's own.

    Raises:
      RuntimeError: if the sampler served another version.
    """
    for version in map(_versions, rollouts):
        if (newest := int(version.max(initial=0))) > step:
            raise RuntimeError(
                f"the sampler serves policy version {newest} and the learner is at {step}; another "
                "run publishes to the same servers"
            )
        if (found := int(version.min(initial=step))) < oldest:
            raise RuntimeError(
                f"a completion has tokens of policy version {found} and the learner is at {step}: "
                "a server missed a publish and went on serving; restart it, or allow old versions "
                "with rollouts.max_staleness"
            )
