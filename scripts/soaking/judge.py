"""Judgement of a soak: counters balance, versions are true, memory and descriptors stay level."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from experiments.runs import Entries, markdown, rollouts

from jaxrl.tracking.tracker import read_metrics

_PARTS = ("trained", "stale", "zero_variance", "waiting")
LONG = 480.0  # seconds; processes that worked shorter are not judged
_PARTS_OF_LIFE = 8
# MB, and number, that none may grow by in as long as it has worked, at the lower rate of those from
# each of its last parts to the next: a leak goes on, and an allocator's growth comes to an end.
_MEMORY, _DESCRIPTORS = 64.0, 8.0
_ROLES = "learner", "jaxrl serve", "agent", "server"


def crashed(status: int, said: Sequence[str]) -> bool:
    """Tells whether a learner that has said these lines ended by a defect, and not with status 1
    and the message of an error that it expects, such as that of servers that all fail."""
    return status != 1 or any(line.startswith("Traceback") for line in said)


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

    def judge(self) -> tuple[str, list[str]]:
        """Returns a table with a row for each role, and what grows or could not be judged."""
        rows = list[dict[str, str]]()
        wrong = list[str]()
        for role in _ROLES:
            if not (found := self._long(role)):
                wrong.append(f"{role}: none worked {LONG:.0f} s, so none was judged")
                continue
            memory = max((_trend(samples, "memory") for samples in found), key=_growth)
            descriptors = max((_trend(samples, "descriptors") for samples in found), key=_growth)
            rows.append(
                {
                    "process": role,
                    "judged": f"{len(found)} of {len(self._seen[role])}",
                    "longest": f"{max(map(_worked, found)) / 60:.0f} min",
                    "memory in the last parts": f"{memory.shown} MB",
                    "growth at the lower rate": f"{memory.growth:+.0f} MB",
                    "descriptors": descriptors.shown,
                }
            )
            if memory.growth > _MEMORY:
                wrong.append(f"{role}: memory grows: {memory.shown} MB")
            if descriptors.growth > _DESCRIPTORS:
                wrong.append(f"{role}: descriptors grow: {descriptors.shown}")
        return markdown(rows), wrong

    def _long(self, role: str) -> list[list[_Sample]]:
        seen = list(self._seen[role].values())  # others may begin meanwhile
        return [samples for samples in seen if _worked(samples) >= LONG]


class _Trend(NamedTuple):
    shown: str
    growth: float  # in all the time that the process worked


def _growth(trend: _Trend) -> float:
    return trend.growth


def _worked(samples: Sequence[_Sample]) -> float:
    return samples[-1].time - samples[0].time


def _trend(samples: Sequence[_Sample], of: str) -> _Trend:
    """Returns how what a process never gives back grows: the lowest tenth in each of the last parts
    of its life. Within a step memory goes up and down."""
    begin, worked = samples[0].time, _worked(samples)
    parts = [list[float]() for _ in range(_PARTS_OF_LIFE)]
    for sample in samples:
        part = int(_PARTS_OF_LIFE * (sample.time - begin) / worked)
        parts[min(part, _PARTS_OF_LIFE - 1)].append(getattr(sample, of))
    first, second, last = (quantiles(values * 2, n=10)[0] for values in parts[-3:])
    shown = f"{first:.0f} -> {second:.0f} -> {last:.0f}"
    return _Trend(shown, _PARTS_OF_LIFE * min(second - first, last - second))
