"""The position of a run: everything in a checkpoint besides the learner's state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.core import Rollout, from_json, to_json


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
    # Rollouts not yet trained on: left over by dynamic sampling, or sampled ahead.
    pending: list[Rollout] = dataclasses.field(default_factory=list)
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
        return vars(self) | {"pending": [to_json(rollout) for rollout in self.pending]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Progress":
        """Inverts `to_json`."""
        fields = dict(content)
        fields["pending"] = [from_json(rollout) for rollout in fields["pending"]]
        return cls(**fields)

    def drop_pending(self) -> None:
        """Drops pending rollouts, which an asynchronous run counts as stale and samples again."""
        groups = {rollout.group for rollout in self.pending}
        self.pending = []
        if self.counts:
            self.counts = self.counts | {"stale": self.counts["stale"] + len(groups)}
            self.running = sorted({*self.running, *groups})
