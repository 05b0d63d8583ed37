"""Judgement of a soak: counters balance, versions are true, memory and descriptors stay level."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from experiments.runs import Entries, markdown, rollouts

from jaxrl.tracking.tracker import read_metrics

_PARTS = ("trained", "stale", "zero_variance", "waiting")
_SHOWN, _LONG = 60.0, 600.0  # seconds; processes that lived shorter are not shown, not judged
# Of memory, MB of memory beside, of descriptors: from the second to the last third.
_GROWTH, _BESIDE, _MORE = 1.1, 64.0, 8


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
    """Memory and descriptors of processes, over time."""

    def __init__(self) -> None:
        """Begins without a process."""
        self._seen: dict[tuple[str, int], list[_Sample]] = defaultdict(list)

    def sample(self, role: str, process: int | None, *, time: float) -> None:
        """Looks at a process; does nothing if it has ended."""
        try:
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            count = len(os.listdir(f"/proc/{process}/fd"))
        except OSError:
            return
        memory = pages * os.sysconf("SC_PAGESIZE") / 1e6
        self._seen[role, process or 0].append(_Sample(time, memory, count))

    def judge(self) -> tuple[str, list[str]]:
        """Returns a table with a row for each role, of its processes that lived long enough, and
        what grew."""
        rows, wrong = list[dict[str, str]](), list[str]()
        for role in sorted({role for role, _ in self._seen}):
            found = [s for (of, _), s in self._seen.items() if of == role and _lived(s) >= _SHOWN]
            if not found:
                continue
            found = [s for s in found if _lived(s) >= _LONG] or found
            worst = max(found, key=lambda samples: _ends(samples, 0)[1] - _ends(samples, 0)[0])
            memory, descriptors = _ends(worst, 0), max((_ends(s, 1) for s in found), key=_grown)
            rows.append(
                {
                    "process": role,
                    "processes": str(len(found)),
                    "longest": f"{max(map(_lived, found)) / 60:.0f} min",
                    "memory": "{:.0f} -> {:.0f} MB".format(*memory),
                    "descriptors": "{:.0f} -> {:.0f}".format(*descriptors),
                }
            )
            if max(map(_lived, found)) < _LONG:
                continue
            if memory[1] > memory[0] * _GROWTH + _BESIDE:
                wrong.append(f"{role}: memory grew from {memory[0]:.0f} to {memory[1]:.0f} MB")
            if _grown(descriptors) > _MORE:
                wrong.append(f"{role}: descriptors grew from {descriptors[0]} to {descriptors[1]}")
        return markdown(rows), wrong


def _lived(samples: Sequence[_Sample]) -> float:
    return samples[-1].time - samples[0].time


def _grown(ends: tuple[float, float]) -> float:
    return ends[1] - ends[0]


def _ends(samples: Sequence[_Sample], which: int) -> tuple[float, float]:
    """Returns the medians of the second and of the last third: the first one warms up."""
    values: list[Any] = [sample[1 + which] for sample in samples]
    third = max(1, len(values) // 3)
    return median(values[third : 2 * third] or values), median(values[-third:])
