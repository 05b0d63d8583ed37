"""What is sampled and not yet learnt from: how much may be begun, and which groups come next.

Nothing here knows of threads or clocks: `jaxrl.training.rollouts.stream` holds the lock and tells
the time.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable

import numpy as np

from jaxrl.config.rollouts import Order
from jaxrl.core.batch import Rollout
from jaxrl.training.rollouts import dynamic_sampling


@dataclasses.dataclass
class Counts:
    """Groups since the start of a run: made = learnt + late + flat + those that are waiting.

    Attributes:
      made: answered completely.
      learnt: handed to the learner.
      late: dropped because their policy was too old, or they had waited too long.
      flat: dropped by dynamic sampling, because all answers of the group earned the same.
    """

    made: int = 0
    learnt: int = 0
    late: int = 0
    flat: int = 0


class Buffer:
    """Groups of answers between the sampler and the learner.

    Admission is AReaL's (arXiv:2505.24298): before the learner's version v at most
    `(max_staleness + v + 1) * batch` groups are begun that are not dropped. A group is learnt from
    at most `max_staleness` versions after the policy that began it, because the learner takes
    `batch` of them for a version: in the order in which they were begun by that count alone, in the
    order in which they finish by dropping the others.
    """

    def __init__(
        self,
        *,
        batch: int,
        batches: int,
        max_staleness: int,
        order: Order = "begun",
        flat_per_batch: int = 0,
        counts: Counts | None = None,
    ) -> None:
        """An empty buffer.

        Args:
          batch: groups that the learner takes for a version.
          batches: that the whole run takes.
          max_staleness: versions between drawing and learning.
          order: in which groups are learnt from.
          flat_per_batch: groups without any difference in reward that may be dropped for a batch.
          counts: of the run so far, which are counted on.
        """
        self.counts = counts or Counts()
        self._batch, self._batches, self._max_staleness = batch, batches, max_staleness
        self._order = order
        self._flat_per_batch = self._flat_left = flat_per_batch
        self._again: deque[int] = deque()
        self._running: set[int] = set()
        self._waiting: dict[int, list[Rollout]] = {}  # in the order in which they finished

    @property
    def running(self) -> list[int]:
        """Numbers of the groups that are being answered or are still to be answered again."""
        return sorted({*self._running, *self._again})

    @property
    def waiting(self) -> list[Rollout]:
        """Answers that wait for the learner, group by group."""
        return [r for group in self._waiting.values() for r in group]

    def restore(self, rollouts: Iterable[Rollout], running: Iterable[int]) -> None:
        """Takes back what `waiting` and `running` said before the program was ended: answers wait
        again, and what was being answered is answered again, before anything new."""
        self._waiting = {}
        for rollout in rollouts:
            self._waiting.setdefault(rollout.group, []).append(rollout)
        self._again = deque(running)

    def begin(self, *, next_number: int, step: int, most: int) -> list[int]:
        """Admits up to `most` groups at the learner's version `step`.

        Those that were admitted before the program was ended come first, and find room always.

        Args:
          next_number: of the first group that was never begun; those returned that are not below it
            are `next_number`, `next_number + 1`, ...
          step: the learner's version.
          most: groups that the caller can answer now.

        Returns:
          Their numbers, none if the buffer is full.
        """
        again = [self._again.popleft() for _ in range(min(most, len(self._again)))]
        self._running.update(again)
        held = self.counts.learnt + len(self._waiting) + len(self._running)
        room = min(self._max_staleness + step + 1, self._batches) * self._batch - held
        new = range(next_number, next_number + max(0, min(room, most - len(again))))
        self._running.update(new)
        return [*again, *new]

    def finish(self, number: int, rollouts: list[Rollout]) -> None:
        """Takes a group with its rewards, which waits from now on."""
        self._running.remove(number)
        self._waiting[number] = rollouts
        self.counts.made += 1

    def take(self, *, step: int) -> list[Rollout] | None:
        """The answers of a batch of groups, to be learnt from at version `step`, or None until
        there are enough. What is too old is dropped before, even if None is returned.

        Raises:
          RuntimeError: for a group that was drawn by a policy newer than the learner's.
        """
        self._drop_late(step=step)
        chosen: list[int] = []
        for number in self._next():
            group = self._waiting[number]
            if self._flat_left and not dynamic_sampling.teaching(group):
                self._flat_left -= 1
                self.counts.flat += 1
                del self._waiting[number]
                continue
            chosen.append(number)
            if len(chosen) == self._batch:
                self._flat_left = self._flat_per_batch
                self.counts.learnt += self._batch
                return [r for n in chosen for r in self._waiting.pop(n)]
        return None

    def _next(self) -> list[int]:
        """Numbers of the groups that may be learnt from, in their order."""
        if self._order == "finished":
            return list(self._waiting)
        first = min(self.running, default=float("inf"))
        return sorted(number for number in self._waiting if number < first)

    def _drop_late(self, *, step: int) -> None:
        for number, rollouts in list(self._waiting.items()):
            oldest, newest = _versions(rollouts, step=step)
            if newest > step:
                raise RuntimeError(
                    f"the sampler answered with policy version {newest} and the learner is at "
                    f"{step}; the sampler serves another run"
                )
            if step - oldest > self._max_staleness:
                self.counts.late += 1
                del self._waiting[number]


def staleness(rollouts: Iterable[Rollout], *, step: int) -> list[int]:
    """For each answer, how many versions the oldest policy that drew of it is behind `step`."""
    return [step - _versions([rollout], step=step)[0] for rollout in rollouts]


def _versions(rollouts: Iterable[Rollout], *, step: int) -> tuple[int, int]:
    """The oldest and the newest policy that drew any of the tokens; `step` if none was drawn, as
    in an episode that could not begin."""
    versions = np.concatenate([r.version for r in rollouts])
    return (int(versions.min()), int(versions.max())) if versions.size else (step, step)
