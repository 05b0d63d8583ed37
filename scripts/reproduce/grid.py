"""Grids of training runs, each trained once, and statistics over their metrics."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments import runs
from experiments.runs import Entries, rollouts

from jaxrl.commands.compile_cache import use_compile_cache
from jaxrl.monitoring.tracking.tracking import read_metrics

SMOOTHED = 5  # rollouts


def set_up(directory: Path) -> None:
    """Creates `directory`, changes to the repository's root and turns on the compile cache."""
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(runs.CONFIGS.parent)
    use_compile_cache()


def trained(file: Path, changes: Mapping[str, object]) -> Entries:
    """Returns the training steps of a run; see `runs.trained`."""
    return rollouts(runs.trained(file, changes))


def found(run_dirs: Iterable[Path]) -> list[Entries]:
    """Reads the training steps of the finished runs."""
    return [rollouts(read_metrics(d / "metrics.jsonl")) for d in run_dirs if runs.finished(d)]


def curve(runs: Sequence[Entries], name: str) -> np.ndarray:
    """Collects a metric of several runs: f64[runs, steps], NaN if not logged."""
    return np.array([[e.get(name) for e in entries] for entries in runs], float)


def early(runs: Sequence[Entries], name: str) -> np.ndarray:
    """Averages a metric over the first ten rollouts: f64[runs]."""
    return np.nanmean(curve(runs, name)[:, :10], axis=1)


def smooth(values: np.ndarray) -> np.ndarray:
    """Averages over SMOOTHED rollouts: f64[runs, N] -> f64[runs, N - SMOOTHED + 1]."""
    return np.lib.stride_tricks.sliding_window_view(values, SMOOTHED, axis=1).mean(axis=-1)


def spread(values: Sequence[float] | np.ndarray, form: str = "{:.3f}") -> str:
    """Formats the mean with the range in brackets, or a single value."""
    numbers = np.asarray(values, float)
    if np.isnan(numbers).any():
        return "-"
    low, high = (form.format(x) for x in (numbers.min(), numbers.max()))
    mean = form.format(numbers.mean())
    return mean if low == high else f"{mean} ({low} to {high})"


def minutes(results: Mapping[Any, Sequence[Entries]]) -> float:
    """Sums the minutes of all rollouts of all runs, compilation included."""
    return sum(e["time/step"] for runs in results.values() for run in runs for e in run) / 60
