"""The learner whose weights a server takes; runs inside vLLM."""

import shlex

from jaxrl.bridge.base import LearnerIdentity

TAKE_OVER = "JAXRL_TAKE_OVER"
"""Environment variable of a learner: the name of the learner that it replaces."""


class ForeignError(ValueError):
    """The request comes from another learner; the message names the server's learner."""


class Ownership:
    """Admits only one learner.

    A learner keeps the server until it disconnects. A resumed process of the same run may take its
    place; any other learner must name the one it replaces. A replaced process stays out, otherwise
    two learners would take turns unnoticed. So does an earlier process of the same run, or of the
    run that was replaced: its request was on its way when it was killed.
    """

    def __init__(self) -> None:
        """Begins without a learner."""
        self._learner: LearnerIdentity | None = None
        self._replaced: set[str] = set()

    def check(self, learner: LearnerIdentity) -> None:
        """Raises ForeignError if a learner may not connect."""
        held = self._learner
        if held is None or held == learner:
            return
        earlier = learner.session < held.session and learner.name in (held.name, held.replaces)
        if earlier or learner.session in self._replaced:
            raise ForeignError(f"learner {held.name!r} has taken the server over from this process")
        if held.name not in (learner.name, learner.replaces):
            raise ForeignError(
                f"the server takes weights from learner {held.name!r}; end that run, or replace it "
                f"by starting this one with {TAKE_OVER}={shlex.quote(held.name)}"
            )

    def take(self, learner: LearnerIdentity) -> None:
        """Connects a learner that `check` admits."""
        if self._learner is not None and self._learner != learner:
            self._replaced.add(self._learner.session)
        self._learner = learner

    def require(self, learner: LearnerIdentity) -> None:
        """Raises ForeignError unless the learner is the one that connected last."""
        if learner != self._learner:
            held = "nobody" if self._learner is None else repr(self._learner.name)
            raise ForeignError(
                f"these weights come from learner {learner.name!r}, session {learner.session}; "
                f"the server takes weights from {held}"
            )

    def release(self) -> None:
        """Disconnects the learner."""
        self._learner = None
