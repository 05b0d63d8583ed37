"""Judgement of a soak: counters balance, versions are true, memory and descriptors stay level."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.runs import Entries, markdown, rollouts
from scipy.stats import theilslopes

from jaxrl.tracking.tracker import read_metrics

_PARTS = ("trained", "stale", "zero_variance", "waiting")
LONG = 480.0  # seconds; processes that worked shorter are not judged
_MEMORY, _DESCRIPTORS = 2.0, 0.5  # MB and number a minute that none may grow by
_ROLES = "learner", "jaxrl serve", "agent", "server"
_BLOCK = 30.0  # seconds: longer than a step, within which memory goes up and down


def steps(run_dir: Path, *, staleness: int) -> list[str]:
    """Returns what is wrong with the steps: a missing or double one, groups that were sampled but
    neither trained on, dropped nor waiting, completions that are too old."""
    wrong, trained = list[str](), rollouts(read_metrics(run_dir / "metrics.jsonl"))
    numbers = [e["step"] for e in trained]
    if numbers != list(range(1, len(numbers) + 1)):
        wrong.append(f"steps are missing or double: {numbers}")
    for e in trained:
        parts = {part: e[f"rollouts/{part}"] for part in _PARTS}
        if e["rollouts/sampled"] != sum(parts.values()):
            wrong.append(f"step {e['step']}: {e['rollouts/sampled']} groups sampled, and {parts}")
        if parts["trained"] != e["step"] * trained[0]["rollouts/trained"]:
            wrong.append(f"step {e['step']}: {parts['trained']} groups trained on")
        if e["staleness/max"] > staleness:
            wrong.append(f"step {e['step']}: a completion is {e['staleness/max']} versions old")
    return [*wrong, *_position(run_dir, step=len(numbers))]


def _position(run_dir: Path, *, step: int) -> list[str]:
    """Each prompt taken was sampled once or is still being sampled."""
    saved = run_dir / "checkpoints" / str(step) / "host" / "metadata"
    host = json.loads(saved.read_text())["host"]
    sampled, running = host["counts"]["sampled"], len(host["running"])
    if host["position"] == sampled + running:
        return []
    return [f"{host['position']} prompts taken, {sampled} sampled, {running} running"]


def outcome(run_dir: Path) -> Entries:
    """Returns the entries of all steps."""
    return rollouts(read_metrics(run_dir / "metrics.jsonl"))


class _Sample(NamedTuple):
    time: float
    memory: float  # MB
    descriptors: int


class Usage:
    """Memory and descriptors of processes by role, over the time that they worked."""

    def __init__(self, file: Path) -> None:
        """Begins without a process; appends what it sees to a file."""
        self._seen: dict[str, dict[int, list[_Sample]]] = {role: {} for role in _ROLES}
        self._file = file

    def sample(self, role: str, processes: Sequence[int], *, time: float) -> None:
        """Looks at processes that work together; does nothing if one has ended."""
        pages = descriptors = 0
        try:
            for process in processes:
                pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
                descriptors += len(os.listdir(f"/proc/{process}/fd"))
        except OSError:
            return
        if processes:
            sample = _Sample(time, pages * os.sysconf("SC_PAGESIZE") / 1e6, descriptors)
            self._seen[role].setdefault(processes[0], []).append(sample)
            with self._file.open("a") as file:
                print(json.dumps([role, processes[0], *sample]), file=file)

    def short(self) -> list[str]:
        """Returns the roles without a process that worked long enough to be judged."""
        return [role for role in _ROLES if not self._long(role)]

    def judge(self) -> tuple[str, list[str]]:
        """Returns a table with a row for each role, and what grows or could not be judged."""
        rows = list[dict[str, str]]()
        wrong = [f"{role}: none worked {LONG:.0f} s, so none was judged" for role in self.short()]
        for role in _ROLES:
            if not (found := self._long(role)):
                continue
            memory = max((_trend(samples, "memory") for samples in found), key=_slope)
            descriptors = max((_trend(samples, "descriptors") for samples in found), key=_slope)
            rows.append(
                {
                    "process": role,
                    "judged": f"{len(found)} of {len(self._seen[role])}",
                    "longest": f"{max(map(_worked, found)) / 60:.0f} min",
                    "memory": f"{memory.first:.0f} -> {memory.last:.0f} MB",
                    "per minute": f"{memory.slope:+.2f} ({memory.low:+.2f} to {memory.high:+.2f})",
                    "descriptors": f"{descriptors.first:.0f} -> {descriptors.last:.0f}",
                }
            )
            if memory.slope > _MEMORY:
                wrong.append(f"{role}: memory grows by {memory.slope:.1f} MB a minute")
            if descriptors.slope > _DESCRIPTORS:
                wrong.append(f"{role}: descriptors grow by {descriptors.slope:.1f} a minute")
        return markdown(rows), wrong

    def _long(self, role: str) -> list[list[_Sample]]:
        return [samples for samples in self._seen[role].values() if _worked(samples) >= LONG]


class _Trend(NamedTuple):
    first: float
    last: float
    slope: float  # per minute
    low: float  # 95 % of the slope
    high: float


def _worked(samples: Sequence[_Sample]) -> float:
    return samples[-1].time - samples[0].time


def _slope(trend: _Trend) -> float:
    return trend.slope


def _trend(samples: Sequence[_Sample], of: str) -> _Trend:
    """Returns the Theil-Sen slope of what a process never gave back: of the lowest values of blocks
    in the second half of its samples."""
    floors, begin = dict[int, float](), samples[0].time + _worked(samples) / 2
    for sample in samples:
        if sample.time >= begin:
            block = int((sample.time - begin) // _BLOCK)
            floors[block] = min(floors.get(block, math.inf), getattr(sample, of))
    values, minutes = list(floors.values()), [block * _BLOCK / 60 for block in floors]
    slope = theilslopes(values, minutes)
    return _Trend(values[0], values[-1], slope.slope, slope.low_slope, slope.high_slope)
