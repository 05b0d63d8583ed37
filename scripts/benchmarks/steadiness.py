"""Long runs of a small model: gradient norm, clipping, KL and reward over thousands of steps."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib
import matplotlib.figure
from benchmarks.quickstart import material

from jaxrl import train as loop
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.monitoring.tracking.tracking import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
# Small steps, so that there can be many; two updates to each, so that something can be clipped.
KEYS = {
    "train.train_batch": "4",
    "train.group_size": "4",
    "train.updates_per_rollout": "2",
    "train.microbatch_tokens": "768",
    "sampling.max_batch": "16",
    "eval.every": "1000",
    "data.eval_limit": "128",
    "checkpoint.every": "1000",
    "checkpoint.keep_best": "0",
    "probe.every": "0",
    "samples.every": "0",
}
SHOWN = {
    "grad_norm": "gradient norm",
    "clip": "share of tokens that are clipped",
    "entropy/sampled": "entropy, from the sampled tokens",
    "reward": "reward",
}


class Course(NamedTuple):
    """A run, its metrics averaged over stretches of steps.

    Attributes:
      kl: its coefficient.
      steps: the last of each stretch.
      means: of each metric of SHOWN.
      largest: gradient norm of each stretch.
    """

    kl: str
    steps: list[int]
    means: dict[str, list[float]]
    largest: list[float]


def train(kl: str, *, steps: int, base: Path, out: Path, stretch: int) -> Course:
    """A run, which goes on where it was ended.

    Args:
      kl: coefficient of the KL term.
      steps: of the run.
      base: has the model and the data of the quickstart.
      out: where the run lies.
      stretch: steps that are averaged.
    """
    run_dir = out / f"kl-{kl}"
    if not (run_dir / "model").exists():
        keys = KEYS | {
            "loss.kl": kl,
            "train.steps": str(steps),
            "run_dir": str(run_dir),
            **material(base),
        }
        loop.train(toml_file.load(Config, file=CONFIG, overrides=list(keys.items())))
    entries = [e for e in read_metrics(run_dir / "metrics.jsonl") if "reward" in e]
    for e in entries:
        e["clip"] = e["clip/low"] + e["clip/high"]
    parts = [entries[i : i + stretch] for i in range(0, len(entries), stretch)]
    means = {name: [fmean(e[name] for e in part) for part in parts] for name in SHOWN}
    largest = [max(e["grad_norm"] for e in part) for part in parts]
    return Course(kl, [part[-1]["step"] for part in parts], means, largest)


def table(courses: Sequence[Course]) -> str:
    """As Markdown: what is averaged over the first, a middle and the last stretch."""
    lines = [
        "| KL coefficient | metric | first | middle | last |",
        "| --- | --- | --- | --- | --- |",
    ]
    for course in courses:
        for name, values in (course.means | {"largest gradient norm": course.largest}).items():
            shown = (values[0], values[len(values) // 2], values[-1])
            cells = " | ".join(f"{value:.3g}" for value in shown)
            lines.append(f"| {course.kl} | {SHOWN.get(name, name)} | {cells} |")
    return "\n".join(lines)


def draw(courses: Sequence[Course], path: Path) -> None:
    """A panel for each metric, a line for each run."""
    figure = matplotlib.figure.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
        for color, course in zip(("tab:orange", "tab:blue", "tab:green"), courses, strict=False):
            axis.plot(course.steps, course.means[name], color=color, label=f"KL {course.kl}")
            if name == "grad_norm":
                axis.plot(course.steps, course.largest, color=color, alpha=0.4, linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("step", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
