"""The `[alarms]` table of a config, and the limits that its rules compare with."""

from collections.abc import Iterator
from typing import Literal

from jaxrl.config.section import DtypePolicy, Section
from jaxrl.diagnostics import LIMITS, Limits

Action = Literal[
    "off", "log", "pause", "stop", "rollback_kl", "rollback_learning_rate", "rollback_precision"
]


class AlarmsConfig(Section):
    """Signs of a run going wrong (docs/operating.md), and what to do about each.

    `off` ignores it. `log` prints it and writes it to the metrics. `pause` also saves a checkpoint
    and exits with status 3; the same command resumes. `stop` exits with status 4 and saves nothing
    more. `rollback_...` returns to the newest checkpoint from before the steps that raised the
    alarm, at least a window, and resumes with one change: the KL coefficient doubled (0.001 if it
    was 0), the learning rate halved, or the precision set to alarms.precision."""

    kl_spike: Action = "log"
    """KL above 5 x the median of the last 20 steps, and above 0.1 nats per token; in steps 10 to
    20, a reward below that of the first two steps, or not above it at a KL above 0.1."""

    kl_with_reward: Action = "log"
    """KL above twice its mean over the last 20 steps, and above 0.1, while the reward rises."""

    gradient_spike: Action = "log"
    """Gradient norm above 5 x its median over those of the last 20 steps in which some group had
    different rewards, and above 0.1."""

    diversity: Action = "log"
    """Share of distinct 3-grams across prompts below 0.3 x that of the first 20 steps."""

    identical: Action = "log"
    """Over 20 steps, completions identical to another completion of their prompt: 0.9 of the way
    from the first steps' share to all of them, while the task is not solved."""

    repetition: Action = "log"
    """Repeated 3-grams within completions: half of the way from the first steps' share to all."""

    length_limit: Action = "log"
    """At least half of the completions are truncated, 0.3 more than in the first steps."""

    length_zero: Action = "log"
    """Completions shorter than 0.1 x the length of the first steps."""

    entropy: Action = "log"
    """Entropy of the sampled tokens below 0.1 x that of the first steps, while the task is not
    solved."""

    held_out: Action = "log"
    """Held-out accuracy 0.1 below its best, while the reward is higher than it was then."""

    zero_variance: Action = "log"
    """For 20 steps, no group has completions with different rewards."""

    sequence_mismatch: Action = "log"
    """The spread of whole completions' log-ratios has doubled and is above 0.5 nats."""

    phantom: Action = "log"
    """Share of tokens that are clipped because of arithmetic alone: above 0.05, or doubled and
    above 0.01."""

    not_finite: Action = "log"
    """In each of the last 10 steps an update was skipped because its gradient was not finite. This
    rule also judges the first steps."""

    precision: DtypePolicy | None = None
    """Dtype policy that rollback_precision changes to; master weights and moments must keep the
    run's dtypes."""

    @property
    def limits(self) -> Limits:
        """The thresholds of the rules."""
        return LIMITS

    @property
    def actions(self) -> dict[str, Action]:
        """The action of each rule."""
        fields = type(self).model_fields.items()
        return {name: getattr(self, name) for name, field in fields if field.annotation is Action}

    @property
    def rolls_back(self) -> bool:
        """True if any alarm rolls back."""
        return any(action.startswith("rollback") for action in self.actions.values())

    @property
    def changes_precision(self) -> str | None:
        """The first rule whose action is rollback_precision."""
        due = (name for name, action in self.actions.items() if action == "rollback_precision")
        return next(due, None)

    def reach(self, *, probe_every: int) -> int:
        """Returns how many steps back a rollback may have to go. held_out is not counted: it
        returns to the best checkpoint, which is always kept."""
        back = {"not_finite": self.limits.not_finite_steps}
        # Three probes, and the step before the first of them.
        back |= dict.fromkeys(("sequence_mismatch", "phantom"), 2 * probe_every + 1)
        due = (steps for name, steps in back.items() if self.actions[name].startswith("rollback"))
        return max([self.limits.window, *due])

    def _contradictions(self) -> Iterator[str]:
        if self.changes_precision and self.precision is None:
            yield (
                f"alarms.{self.changes_precision} = 'rollback_precision' needs alarms.precision, "
                "the dtype policy to change to"
            )
