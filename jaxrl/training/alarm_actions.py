"""Actions of a run on its alarms: log, pause, roll back, stop."""

from typing import Literal, NamedTuple

from jaxrl import models
from jaxrl.config.bucket import local_directory
from jaxrl.diagnostics import RULES, Alarm, check_alarms
from jaxrl.learner import usual_learning_rates
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training import rollbacks
from jaxrl.training.run import Run

_MAX_ROLLBACKS = 2  # per run: a problem that survives two changes needs a person
_SEVERITY = ("log", "pause", "rollback", "stop")  # of several actions, the most severe is taken


class Verdict(NamedTuple):
    """The end of a run by an alarm."""

    action: Literal["pause", "rollback", "stop"]  # what the run does
    message: str  # the reason, and how to resume


class AlarmActions:
    """Checks the metrics of a run after each step and acts on alarms."""

    def __init__(self, run: Run) -> None:
        """Reads the alarms that the run has raised so far."""
        self._run, self._config, self._tracker = run, run.config, run.tracker
        self._directory = local_directory(run.config.run_dir)
        entries = read_metrics(self._directory / "metrics.jsonl")
        events = (e["event"] for e in entries if "event" in e)
        self._raised = {e["alarm"]: e["at"] for e in events if e["action"] != "rollback"}

    def check(self) -> Verdict | None:
        """Checks the newest step and logs every alarm; returns None if the run continues."""
        config = self._config.alarms
        alarms = check_alarms(self._tracker.history, config.limits, raised=self._raised)
        alarms = [alarm for alarm in alarms if config.actions[alarm.name] != "off"]
        if not alarms:
            return None
        worst = max(alarms, key=lambda alarm: _SEVERITY.index(self._kind(alarm)))
        for alarm in alarms:
            self._raised[alarm.name] = alarm.step
            if alarm is not worst:
                self._log(alarm, action="log", more="")
        return self._act(worst)

    def _kind(self, alarm: Alarm) -> str:
        return self._config.alarms.actions[alarm.name].split("_")[0]

    def _act(self, alarm: Alarm) -> Verdict | None:
        kind, more = self._kind(alarm), ""
        if kind == "rollback":
            try:
                return self._roll_back(alarm)
            except ValueError as error:
                kind, more = "pause", f"no rollback: {error}"
        self._log(alarm, action=kind, more=more)
        message = f"{self._described(alarm)}{'; ' * bool(more)}{more}\n"
        directory = self._directory
        if kind == "pause":
            return Verdict(
                "pause",
                f"paused: {message}saved in {directory}; run the same command to resume. You may "
                f"change [alarms] and [checkpoint] first; alarms.{alarm.name} = 'log' does not "
                f"pause again. `jaxrl report {directory}` shows the metrics. To change other keys, "
                "export the model with `jaxrl export` and start another run from it",
            )
        if kind == "stop":
            return Verdict("stop", f"stopped: {message}checkpoints are kept in {directory}")
        return None

    def _roll_back(self, alarm: Alarm) -> Verdict:
        """Chooses a checkpoint to return to and a change of the config.

        Raises:
          ValueError: if no checkpoint is left, or no change is possible.
        """
        config, checkpoints = self._config, self._run.checkpoints
        before = len(rollbacks.read(self._directory))
        if before >= _MAX_ROLLBACKS:
            raise ValueError(f"the run was rolled back {before} times already")
        checkpoints.wait()
        to = rollbacks.target(config, checkpoints.directory, healthy=alarm.healthy)
        if to is None:
            raise ValueError(f"no checkpoint from before step {alarm.healthy + 1} is left")
        changes = rollbacks.remedy(config.alarms.actions[alarm.name], config)
        self._run.learning.check_attention(rollbacks.changed(config, changes))
        decided = rollbacks.decide(self._directory, alarm, to=to, config=config, changes=changes)
        more = f"back to step {to} with {decided.in_words}"
        self._log(alarm, action="rollback", more=more)
        return Verdict("rollback", f"{self._described(alarm)}; {more} (rollback {before + 1})")

    def _log(self, alarm: Alarm, *, action: str, more: str) -> None:
        acted = f"; {action}" * (action != "log")
        self._tracker.note(f"{self._described(alarm)}{acted}{'; ' * bool(more)}{more}")
        self._tracker.event(
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

    def _described(self, alarm: Alarm) -> str:
        known = RULES[alarm.name].cause
        return (
            f"step {alarm.step}: {known.title}: {alarm.text} (limit {alarm.limit:.3g}). Likely: "
            f"{known.causes}. Keys: {', '.join(known.keys)}{self._learning_rates(known.keys[0])}"
        )

    def _learning_rates(self, key: str) -> str:
        """Names the usual range if the learning rate is the first key to try and is outside it."""
        of, adapters = self._config.optimizer, self._config.lora.rank > 0
        parameters = models.parameter_count(self._run.learning.model.specs)
        low, high = usual_learning_rates(parameters, adapters=adapters)
        within = low <= of.learning_rate <= high
        if key != "optimizer.learning_rate" or of.name != "adamw" or within:
            return ""
        return (
            f". optimizer.learning_rate is {of.learning_rate:g}; usual for adamw and "
            f"{parameters:.2g} parameters{' with adapters' * adapters} is {low:.1g} to "
            f"{high:.1g}"
        )
