"""The position of a run: everything in a checkpoint besides the learner's state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.core import Rollout, from_json, to_json

_ROLLOUTS = ("pending", "replay")


@dataclasses.dataclass
class Progress:
    """The host's state of a run."""

    step: int = 0  # rollout batches trained on, which is also the policy version
    position: int = 0  # prompts taken from the data so far
    # Held-out accuracy before the first step; None if it is not measured.
    initial_accuracy: float | None = None
    initial_failed: int = 0  # completions of it that could not be scored
    # The latest held-out accuracy.
    accuracy: float | None = None
    failed: int = 0
    held_out: str | None = None  # digest of the data that both are of; None if it was not kept
    # Rollouts not yet trained on: left over by dynamic sampling, or sampled ahead.
    pending: list[Rollout] = dataclasses.field(default_factory=list)
    # Groups of the last batch that the next one trains on again.
    replay: list[Rollout] = dataclasses.field(default_factory=list)
    # Numbers of prompts that were being sampled; they are sampled again on resuming.
    running: list[int] = dataclasses.field(default_factory=list)
    # `buffer.Counts` of an asynchronous run.
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    short_batches: int = 0  # steps in which dynamic sampling found too few groups
    # Coefficients of the terms that controllers steer.
    coefficients: dict[str, float] = dataclasses.field(default_factory=dict)
    precision: str | None = None  # the dtype policy of the run so far

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON that a checkpoint holds."""
        kept = {name: getattr(self, name) for name in _ROLLOUTS}
        return vars(self) | {name: [to_json(r) for r in some] for name, some in kept.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Progress":
        """Inverts `to_json`."""
        fields = dict(content)
        for name in _ROLLOUTS:
            fields[name] = [from_json(rollout) for rollout in fields.get(name, [])]
        return cls(**fields)

    def measure_on(self, data: str) -> bool:
        """Sets the digest of the held-out data. Forgets accuracies on other data, and tells if they
        may have been measured."""
        other = self.held_out not in (None, "", data)
        if other:
            self.initial_accuracy = self.accuracy = None
        self.held_out = data
        return other

    def drop_pending(self) -> None:
        """Drops the rollouts that are to be trained on; an asynchronous run counts pending ones as
        stale and samples them again."""
        groups = {rollout.group for rollout in self.pending}
        self.pending, self.replay = [], []
        if self.counts:
            self.counts = self.counts | {"stale": self.counts["stale"] + len(groups)}
            self.running = sorted({*self.running, *groups})
