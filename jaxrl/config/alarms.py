"""The `[alarms]` table of a config: a key for each rule, with the rule's condition as its help."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, create_model

from jaxrl.config.section import DtypePolicy, Section
from jaxrl.diagnostics import LIMITS, RULES, Limits

Action = Literal[
    "off", "log", "pause", "stop", "rollback_kl", "rollback_learning_rate", "rollback_precision"
]


_KEYS: dict[str, Any] = {
    name: (Action, Field("log", description=rule.cause.condition)) for name, rule in RULES.items()
}
_Rules = create_model("_Rules", __base__=Section, **_KEYS)


class AlarmsConfig(_Rules):
    """Signs of a run going wrong (docs/alarms.md), and the action on each.

    `off` ignores it. `log` prints it and writes it to the metrics. `pause` also saves a checkpoint
    and exits with status 3; the same command resumes. `stop` exits with status 4 and saves nothing
    more. `rollback_...` returns to the newest checkpoint before the steps that raised the alarm, at
    least a window back, and resumes with one change: the KL coefficient doubled (0.001 if it was
    0), the learning rate halved, or the precision set to alarms.precision."""

    precision: DtypePolicy | None = None
    """Dtype policy that rollback_precision changes to; the dtypes of master weights and moments
    must stay the same."""

    @property
    def limits(self) -> Limits:
        """The thresholds of the rules."""
        return LIMITS

    @property
    def actions(self) -> dict[str, Action]:
        """The action of each rule."""
        return {name: getattr(self, name) for name in RULES}

    @property
    def rolls_back(self) -> bool:
        """True if any alarm rolls back."""
        return any(action.startswith("rollback") for action in self.actions.values())

    @property
    def changes_precision(self) -> str | None:
        """The first rule whose action is rollback_precision."""
        due = (name for name, action in self.actions.items() if action == "rollback_precision")
        return next(due, None)

    @property
    def best_kept(self) -> int:
        """The number of best checkpoints that rollbacks need: held_out returns to the best one."""
        return int(self.actions["held_out"].startswith("rollback"))

    def reach(self, *, probe_every: int, judge_every: int) -> int:
        """Returns the most steps that a rollback may have to go back. held_out is not counted, see
        `best_kept`."""
        back = {"not_finite": self.limits.not_finite_steps}
        # Three probes or judgements, and the step before the first of them.
        back |= dict.fromkeys(("sequence_mismatch", "phantom"), 2 * probe_every + 1)
        back["judge"] = 2 * judge_every + 1
        due = (steps for name, steps in back.items() if self.actions[name].startswith("rollback"))
        return max([self.limits.window, *due])

    def _contradictions(self) -> Iterator[str]:
        if self.changes_precision and self.precision is None:
            yield (
                f"alarms.{self.changes_precision} = 'rollback_precision' needs alarms.precision, "
                "the dtype policy to change to"
            )
