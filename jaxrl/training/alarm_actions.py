"""What a run does about its alarms: it says so, pauses, goes back, or ends."""

from typing import Literal, NamedTuple

from jaxrl.builders.model import attention_note
from jaxrl.core import precision
from jaxrl.monitoring.alarms.causes import CAUSES
from jaxrl.monitoring.alarms.rules import Alarm, check_alarms
from jaxrl.monitoring.tracking.tracking import read_metrics
from jaxrl.training import rollbacks
from jaxrl.training.run import Run

_WEIGHT = ("log", "pause", "rollback", "stop")  # the last of those that are due is done


class Verdict(NamedTuple):
    """Why a run does not go on.

    Attributes:
      action: what happens.
      message: why, and how to go on.
    """

    action: Literal["pause", "rollback", "stop"]
    message: str


class Guard:
    """Looks at the metrics of a run after each of its steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        events = (e["event"] for e in read_metrics(run.directory / "metrics.jsonl") if "event" in e)
        self._raised = {e["alarm"]: e["at"] for e in events if e["action"] != "rollback"}

    def check(self) -> Verdict | None:
        """Judges the newest step, writes every alarm into the metrics and says what to do; None to
        go on."""
        run, config = self._run, self._run.config.alarms
        alarms = check_alarms(run.tracker.history, config.limits, raised=self._raised)
        alarms = [alarm for alarm in alarms if config.action(alarm.name) != "off"]
        if not alarms:
            return None
        worst = max(alarms, key=lambda alarm: _WEIGHT.index(self._kind(alarm)))
        for alarm in alarms:
            self._raised[alarm.name] = alarm.step
            if alarm is not worst:
                self._log(alarm, action="log", more="")
        return self._act(worst)

    def _kind(self, alarm: Alarm) -> str:
        return self._run.config.alarms.action(alarm.name).split("_")[0]

    def _act(self, alarm: Alarm) -> Verdict | None:
        kind, more = self._kind(alarm), ""
        if kind == "rollback":
            try:
                return self._roll_back(alarm)
            except ValueError as error:
                kind, more = "pause", f"it cannot be rolled back: {error}"
        self._log(alarm, action=kind, more=more)
        message = f"{_said(alarm)}{'; ' * bool(more)}{more}\n"
        directory = self._run.directory
        if kind == "pause":
            return Verdict(
                "pause",
                f"paused: {message}saved in {directory}; the same command goes on. [alarms] and "
                f"[checkpoint] may be changed before, alarms.{alarm.name} = 'log' is not asked "
                f"again. `jaxrl report {directory}` shows what happened; to change other keys, "
                "begin another run with what `jaxrl export` makes of this one",
            )
        if kind == "stop":
            return Verdict("stop", f"stopped: {message}the checkpoints in {directory} are left")
        return None

    def _roll_back(self, alarm: Alarm) -> Verdict:
        """Decides where to go back to and what to change.

        Raises:
          ValueError: if there is no place to go back to, or no change that can be made.
        """
        run = self._run
        before, most = len(rollbacks.read(run.directory)), run.config.alarms.max_rollbacks
        if before >= most:
            raise ValueError(f"alarms.max_rollbacks = {most} have been made")
        run.checkpoints.wait()
        to = rollbacks.target(run.config, run.checkpoints.directory, healthy=alarm.healthy)
        if to is None:
            raise ValueError(f"no checkpoint from before step {alarm.healthy + 1} is left")
        changes = rollbacks.remedy(run.config.alarms.action(alarm.name), run.config)
        changed = rollbacks.changed(run.config, changes)
        attention_note(
            changed.train.attention,
            config=run.model.config,
            layout=run.layout,
            policy=precision.parse(changed.precision),
            length=changed.row_length,
        )
        decided = rollbacks.decide(run.directory, alarm, to=to, config=run.config, changes=changes)
        more = f"back to step {to} with {decided.in_words}"
        self._log(alarm, action="rollback", more=more)
        return Verdict("rollback", f"{_said(alarm)}; {more} (rollback {before + 1})")

    def _log(self, alarm: Alarm, *, action: str, more: str) -> None:
        tracker = self._run.tracker
        tracker.note(f"{_said(alarm)}{f'; {action}' * (action != 'log')}{'; ' * bool(more)}{more}")
        tracker.event(
            alarm.step,
            {
                "alarm": alarm.name,
                "at": alarm.step,
                "action": action,
                "value": alarm.value,
                "limit": alarm.limit,
                "text": alarm.text,
                "more": more,
            },
        )


def _said(alarm: Alarm) -> str:
    known = CAUSES[alarm.name]
    return (
        f"step {alarm.step}: {known.title}: {alarm.text} (limit {alarm.limit:.3g}). Likely: "
        f"{known.causes}. Keys: {', '.join(known.keys)}"
    )
