"""Every recipe on the quickstart's task: one base model, one budget, several seeds, one picture."""

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
# A third of the quickstart's answers.
BUDGET = {
    "train.steps": "24",
    "train.train_batch": "16",
    "optimizer.learning_rate": "2e-4",
    "eval.every": "4",
    "data.eval_limit": "128",
    "checkpoint.every": "0",
    "checkpoint.keep_best": "0",
    "probe.every": "0",
    "loss.kl": "0.0",
}


class Curve(NamedTuple):
    """Held-out accuracy of one run."""

    recipe: str
    seed: int
    steps: list[int]
    accuracy: list[float]


def train(recipe: str, *, seed: int, base: Path, out: Path) -> Curve:
    """The curve of a run; a run found finished is read, one found half done goes on."""
    run_dir = out / f"{recipe}-{seed}"
    if not (run_dir / "model").exists():
        keys = BUDGET | {
            "loss.name": recipe,
            "seed": str(seed),
            "run_dir": str(run_dir),
            **material(base),
        }
        loop.train(toml_file.load(Config, file=CONFIG, overrides=list(keys.items())))
    entries = read_metrics(run_dir / "metrics.jsonl")
    points = {e["step"]: e["eval/accuracy"] for e in entries if e.get("eval/accuracy") is not None}
    return Curve(recipe, seed, list(points), list(points.values()))


def table(curves: Sequence[Curve]) -> str:
    """Accuracy at the end and averaged over the run, as Markdown; mean over seeds (least, most)."""
    lines = ["| recipe | at the end, % | over the run, % |", "| --- | --- | --- |"]
    for recipe in sorted({c.recipe for c in curves}):
        mine = [c for c in curves if c.recipe == recipe]
        end = [100 * c.accuracy[-1] for c in mine]
        area = [100 * fmean(c.accuracy) for c in mine]
        lines.append(f"| `{recipe}` | {_spread(end)} | {_spread(area)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def draw(curves: Sequence[Curve], path: Path, *, beside: str = "grpo") -> None:
    """A panel for each recipe: its seeds, their mean, and in grey the mean of another recipe."""
    names = sorted({c.recipe for c in curves})
    columns = 6
    rows = -(-len(names) // columns)
    figure = matplotlib.figure.Figure(figsize=(2.4 * columns, 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    grey = [c for c in curves if c.recipe == beside]
    for axis, name in zip(axes, names, strict=False):
        mine = [c for c in curves if c.recipe == name]
        for c in mine:
            axis.plot(c.steps, c.accuracy, color="tab:blue", alpha=0.35, linewidth=0.8)
        for these, color in ((grey, "0.6"), (mine, "tab:blue")):
            if these:
                means = [fmean(values) for values in zip(*(c.accuracy for c in these), strict=True)]
                axis.plot(these[0].steps, means, color=color, linewidth=1.6)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for axis in list(figure.axes)[len(names) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out accuracy, greedy", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
