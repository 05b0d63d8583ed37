"""Grids of training runs, each trained once, and statistics over their metrics."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments import runs
from experiments.runs import Entries, rollouts

from jaxrl.commands.compile_cache import use_compile_cache
from jaxrl.tracking.tracker import read_metrics

SMOOTHED = 5  # rollouts


def set_up(directory: Path) -> None:
    """Creates `directory`, changes to the repository's root and turns on the compile cache."""
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(runs.CONFIGS.parent)
    use_compile_cache()


def finished_runs(directory: Path, patterns: Mapping[Any, str]) -> dict[Any, list[Path]]:
    """Lists the directories of the finished runs of each row or cell, sorted by seed; its pattern
    matches their names."""
    there = {
        key: [d for d in sorted(directory.glob(pattern)) if runs.finished(d)]
        for key, pattern in patterns.items()
    }
    return {key: run_dirs for key, run_dirs in there.items() if run_dirs}


def read_rollouts(run_dir: Path) -> Entries:
    """Reads the training steps of a run."""
    return rollouts(read_metrics(run_dir / "metrics.jsonl"))


def found(directory: Path, patterns: Mapping[Any, str]) -> dict[Any, list[Entries]]:
    """Reads the training steps of the finished runs of each row or cell, sorted by seed; its
    pattern matches the names of their directories."""
    there = finished_runs(directory, patterns)
    return {key: [read_rollouts(d) for d in run_dirs] for key, run_dirs in there.items()}


def curve(runs: Sequence[Entries], name: str) -> np.ndarray:
    """Collects a metric of several runs: f64[runs, steps], NaN if not logged."""
    return np.array([[e.get(name) for e in entries] for entries in runs], float)


def early(runs: Sequence[Entries], name: str) -> np.ndarray:
    """Averages a metric over the first ten rollouts: f64[runs]."""
    return np.nanmean(curve(runs, name)[:, :10], axis=1)


def smooth(values: np.ndarray) -> np.ndarray:
    """Averages over SMOOTHED rollouts: f64[runs, N] -> f64[runs, N - SMOOTHED + 1]."""
    return np.lib.stride_tricks.sliding_window_view(values, SMOOTHED, axis=1).mean(axis=-1)


def minutes(results: Mapping[Any, Sequence[Entries]]) -> float:
    """Sums the minutes of all rollouts of all runs, compilation included."""
    return sum(e["time/step"] for runs in results.values() for run in runs for e in run) / 60
