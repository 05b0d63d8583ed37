"""The table of a config that says what a run does about its alarms."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxrl.config.tables import Fraction, Section
from jaxrl.core import precision

Action = Literal[
    "off", "log", "pause", "stop", "rollback_kl", "rollback_learning_rate", "rollback_precision"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Where the rules draw their lines; `config.alarms.AlarmsConfig` says what each means."""

    warmup: int = 20
    window: int = 20
    kl_factor: float = 5.0
    kl_floor: float = 0.1
    gradient_factor: float = 5.0
    gradient_floor: float = 0.1
    distinct_factor: float = 0.3
    identical_rise: float = 0.9
    repetition_rise: float = 0.5
    truncated_share: float = 0.5
    length_factor: float = 0.1
    entropy_factor: float = 0.1
    held_out_drop: float = 0.1
    mismatch_nats: float = 0.5
    phantom_share: float = 0.05
    not_finite_steps: int = 10

    @property
    def short(self) -> int:
        """Steps whose mean is compared where single steps are noisy."""
        return max(1, self.window // 4)


class AlarmsConfig(Section):
    """Signs that a run goes wrong (docs/operating.md), and what is done about each.

    `off` nothing; `log` says so and writes it into the metrics; `pause` also saves a checkpoint and
    ends the run with exit status 3, and the same command goes on; `stop` ends it with exit status 4
    and saves nothing more. `rollback_...` goes back to the newest checkpoint from before
    what the alarm looked at, at least a window, and on from there with one thing changed: the KL
    coefficient doubled (.001 if it was 0), the learning rate halved, or the precision of
    alarms.precision."""

    kl_spike: Action = "log"
    """KL above kl_factor x the median of the window, and above kl_floor."""

    kl_with_reward: Action = "log"
    """KL above twice its mean over the window, and above kl_floor, while the reward rises."""

    gradient_spike: Action = "log"
    """Gradient norm above gradient_factor x the median of the window's steps in which some group
    had spread, and above gradient_floor."""

    diversity: Action = "log"
    """Distinct 3-grams across prompts below distinct_factor x those of the first steps."""

    identical: Action = "log"
    """Answers that equal another answer to their prompt, over a window: identical_rise of the way
    from the first steps' share to all, and the task is not solved."""

    repetition: Action = "log"
    """Repeated 3-grams within answers: repetition_rise of the way from the first steps to all."""

    length_limit: Action = "log"
    """At least truncated_share of the answers are cut, .3 more than in the first steps."""

    length_zero: Action = "log"
    """Answers shorter than length_factor x those of the first steps."""

    entropy: Action = "log"
    """Entropy of the sampled tokens below entropy_factor x that of the first steps, and the task is
    not solved."""

    held_out: Action = "log"
    """Held-out accuracy held_out_drop below its best while the reward is higher than then."""

    zero_spread: Action = "log"
    """For a window no group has answers of different reward."""

    sequence_mismatch: Action = "log"
    """The spread of whole answers' log-ratios has doubled and is above mismatch_nats."""

    phantom: Action = "log"
    """Tokens clipped for arithmetic alone: above phantom_share, or doubled and above a fifth."""

    not_finite: Action = "log"
    """In each of the last not_finite_steps steps an update was skipped, because its gradient was
    not finite. Judged from the first step on."""

    max_rollbacks: NonNegativeInt = 2
    """In the whole run; an alarm that would roll back once more pauses."""

    precision: str | None = None
    """The dtype policy that rollback_precision changes to; master weights and moments must be those
    of the run's."""

    warmup: PositiveInt = Limits.warmup
    """Steps that later ones are compared with; only not_finite judges them."""

    window: PositiveInt = Limits.window
    """Steps that a step is compared with, and for which an alarm is silent after it was raised;
    means of noisy metrics are over a quarter of it."""

    kl_factor: PositiveFloat = Limits.kl_factor
    """See kl_spike."""

    kl_floor: NonNegativeFloat = Limits.kl_floor
    """Nats a token; a smaller KL is never an alarm."""

    gradient_factor: PositiveFloat = Limits.gradient_factor
    """See gradient_spike."""

    gradient_floor: NonNegativeFloat = Limits.gradient_floor
    """A smaller gradient norm is never an alarm."""

    distinct_factor: Fraction = Limits.distinct_factor
    """See diversity."""

    identical_rise: Fraction = Limits.identical_rise
    """See identical."""

    repetition_rise: Fraction = Limits.repetition_rise
    """See repetition."""

    truncated_share: Fraction = Limits.truncated_share
    """See length_limit."""

    length_factor: Fraction = Limits.length_factor
    """See length_zero."""

    entropy_factor: Fraction = Limits.entropy_factor
    """See entropy."""

    held_out_drop: Annotated[float, Field(ge=0, le=1)] = Limits.held_out_drop
    """See held_out."""

    mismatch_nats: NonNegativeFloat = Limits.mismatch_nats
    """See sequence_mismatch."""

    phantom_share: Fraction = Limits.phantom_share
    """See phantom."""

    not_finite_steps: PositiveInt = Limits.not_finite_steps
    """See not_finite. A dynamic loss scale that begins too high skips a few steps and settles: ten
    bring it from 65536 to 64."""

    @property
    def limits(self) -> Limits:
        """What the rules compare with."""
        return Limits(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Limits)})

    @property
    def rolls_back(self) -> bool:
        """Whether any alarm does."""
        return any(self.action(name).startswith("rollback") for name in self.rules)

    def reach(self, *, probe_every: int) -> int:
        """Steps that a rollback may have to go back over. held_out goes back to the best
        checkpoint, which is kept anyhow."""
        back = {"not_finite": self.not_finite_steps}
        # Three probes, and the step before the first of them.
        back |= dict.fromkeys(("sequence_mismatch", "phantom"), 2 * probe_every + 1)
        due = (steps for name, steps in back.items() if self.action(name).startswith("rollback"))
        return max([self.window, *due])

    def action(self, name: str) -> Action:
        """What is done about an alarm."""
        return getattr(self, name)

    def contradiction(
        self, *, own: str, strict: bool, urls: Sequence[str], checkpoint_every: int
    ) -> str | None:
        """What of this table cannot hold in a run; None if all can.

        Args:
          own: `precision` of the run.
          strict: its `strict_precision`.
          urls: of servers that the run does not start.
          checkpoint_every: its `checkpoint.every`.
        """
        if self.rolls_back and not checkpoint_every:
            return (
                "checkpoint.every = 0 leaves an alarm that rolls back nothing to go back to; set "
                "it, or let the alarm pause"
            )
        switching = [name for name in self.rules if self.action(name) == "rollback_precision"]
        if switching and self.precision is None:
            return f"alarms.{switching[0]} = 'rollback_precision' needs alarms.precision"
        if self.precision is None:
            return None
        new, old = precision.parse(self.precision), precision.parse(own)
        if (new.params, new.moments) != (old.params, old.moments):
            return (
                f"alarms.precision = {self.precision!r} keeps other master weights or moments than "
                f"precision = {own!r}, so that its checkpoints do not fit; change other roles"
            )
        if switching and urls and new.sampler != old.sampler:
            return (
                f"alarms.{switching[0]} = 'rollback_precision' would change the sampler from "
                f"{precision.short_name(old.sampler)} to {precision.short_name(new.sampler)}, and "
                "servers of sampler.url go on in the dtype that they were started in: let the "
                "alarm pause, or let the run start its server (without sampler.url)"
            )
        if switching and strict and (advice := precision.disagreement(new)) is not None:
            return f"strict_precision = true and alarms.precision = {self.precision!r}: {advice}"
        return None

    @property
    def rules(self) -> list[str]:
        """Names of the rules: the keys whose values are actions."""
        return [
            name for name, field in type(self).model_fields.items() if field.annotation is Action
        ]
