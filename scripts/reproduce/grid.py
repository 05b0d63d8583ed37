"""Grids of training runs: each with its config and its directory, and none done twice."""

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.monitoring.tracking.tracking import read_metrics
from jaxrl.train import train

Entries = list[dict[str, Any]]  # one for each rollout of a run, as metrics.jsonl holds them
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, so that it can be a key
class Row:
    """A line of a table.

    Attributes:
      name: as the table shows it.
      changes: keys of the config by which it differs from the file.
    """

    name: str
    changes: Mapping[str, str]


def set_up(directory: Path) -> None:
    """Relative paths mean the same from everywhere, and runs alike share their compiled programs,
    which take longer to make than most of these runs."""
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def finished(run_dir: Path) -> bool:
    """Whether a directory holds a run to its end; its picture is the last thing that it writes."""
    return (run_dir / "curves.png").exists()


def trained(file: Path, changes: Mapping[str, str]) -> Entries:
    """The metrics of a run, which is trained unless its directory holds it to the end.

    Args:
      file: of the config.
      changes: over it; "run_dir" among them.

    Raises:
      KeyboardInterrupt: if a signal ended the run; the same call goes on with it.
    """
    directory = Path(changes["run_dir"])
    if not finished(directory):
        config = toml_file.load(Config, file=file, overrides=list(changes.items()))
        if config.sampler.url:  # of a new server, and a run that is resumed must keep its config
            shutil.rmtree(directory, ignore_errors=True)
        if train(config).signum is not None:
            raise KeyboardInterrupt
    return metrics(directory)


def metrics(run_dir: Path) -> Entries:
    """What a run has logged of its rollouts."""
    return [e for e in read_metrics(run_dir / "metrics.jsonl") if "reward" in e]


def curve(runs: Sequence[Entries], name: str) -> np.ndarray:
    """A metric of several runs, f64[runs, steps]; NaN where it was not logged."""
    return np.array([[_number(e.get(name)) for e in entries] for entries in runs])


def early(runs: Sequence[Entries], name: str, *, steps: int = 10) -> np.ndarray:
    """Its mean over the first `steps` rollouts, f64[runs]."""
    return np.nanmean(curve(runs, name)[:, :steps], axis=1)


def spread(values: Sequence[float] | np.ndarray, form: str = "{:.3f}") -> str:
    """The mean with the least and the largest value in brackets, or a single value."""
    numbers = np.asarray(values, float)
    if np.isnan(numbers).any():
        return "-"
    low, high = (form.format(x) for x in (numbers.min(), numbers.max()))
    mean = form.format(numbers.mean())
    return mean if low == high else f"{mean} ({low} to {high})"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def minutes(runs: Sequence[Entries]) -> float:
    """Minutes that the rollouts of these runs took, compilation included."""
    return sum(e["time/step"] for entries in runs for e in entries) / 60


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
