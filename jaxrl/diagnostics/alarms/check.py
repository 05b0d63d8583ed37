"""Alarms: findings of all rules, after each step of a run or over a finished run's metrics."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import Limits
from jaxrl.diagnostics.alarms.rules import RULES

# The first two compare nothing; `kl_spike` compares the first steps with each other.
_FROM_THE_FIRST_STEP = {"not_finite", "failed_rewards", "kl_spike"}


class Alarm(NamedTuple):
    """A raised finding."""

    name: str  # of the rule, as in `RULES`
    step: int  # after which it was raised
    healthy: int  # newest step before the problem: a window ago, or earlier, or the beginning
    value: float
    limit: float
    text: str


def check_alarms(history: History, limits: Limits, *, raised: Mapping[str, int]) -> list[Alarm]:
    """Applies all rules to the newest step. `raised` has the step of each rule's last alarm; the
    rule is silent for a window after it."""
    silent = {name for name, step in raised.items() if history.step <= step + limits.window}
    if history.done <= limits.warmup:
        silent |= RULES.keys() - _FROM_THE_FIRST_STEP
    alarms, window_ago = list[Alarm](), history.step - limits.window
    for name, rule in RULES.items():
        if name not in silent and (found := rule.find(history, limits)) is not None:
            healthy = window_ago if found.since is None else min(window_ago, found.since)
            healthy = max(history.begun, healthy)
            alarms.append(Alarm(name, history.step, healthy, *found[:3]))
    return alarms


def replay_alarms(entries: Iterable[Mapping[str, Any]], limits: Limits) -> list[Alarm]:
    """Returns all alarms that a run with these entries of `tracking.read_metrics` raises."""
    history, raised, alarms = History(), dict[str, int](), list[Alarm]()
    for _, group in itertools.groupby(entries, key=lambda entry: entry["step"]):
        of_step = list(group)
        for entry in (e for e in of_step if "event" not in e):
            history.add(entry)
        if any("reward" in entry for entry in of_step):
            new = check_alarms(history, limits, raised=raised)
            raised |= {alarm.name: alarm.step for alarm in new}
            alarms += new
        for entry in (e for e in of_step if "event" in e):  # an event affects later steps only
            history.add(entry)
    return alarms
