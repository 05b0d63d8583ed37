"""A row of the table of alarms: a rule with its explanation, written once."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import NamedTuple

from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import LIMITS, Limits


class Finding(NamedTuple):
    """The result of a rule."""

    value: float  # of the metric that the rule judges
    limit: float  # that the value crossed
    text: str  # both in words
    since: int | None = None  # newest step before the problem, if it may precede the window


Find = Callable[[History, Limits], Finding | None]


class Cause(NamedTuple):
    """The explanation of an alarm in the log, the help of `[alarms]` and docs/alarms.md."""

    title: str  # the alarm in a few words
    condition: str  # with the default limits
    causes: str  # likely ones, the likeliest first
    keys: tuple[str, ...]  # of the config, in the order in which to try them


class Rule(NamedTuple):
    """A sign that training goes wrong, and its explanation."""

    find: Find
    cause: Cause


def rule(title: str, *, causes: str, keys: tuple[str, ...]) -> Callable[[Find], Rule]:
    """Makes a `Rule` of a function. The first paragraph of its docstring is the condition, with
    names of `Limits` in braces; for the arguments see `Cause`."""

    def make(find: Find) -> Rule:
        condition = " ".join((inspect.getdoc(find) or "").split("\n\n")[0].split())
        limits = {name: f"{value:g}" for name, value in dataclasses.asdict(LIMITS).items()}
        return Rule(find, Cause(title, condition.format_map(limits), causes, keys))

    return make
