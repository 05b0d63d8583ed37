"""Trains every recipe on the quickstart's task and plots held-out accuracy.

    ./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
    python scripts/experiments/compare_losses.py [--recipes grpo gspo] [--seeds 0 1 2]

Runs are kept under --out; rerun the same command to resume.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib.figure
from runs import CONFIGS, accuracies, quickstart, trained

from jaxrl.losses import recipes

# A third of the quickstart's completions.
BUDGET = {
    "train.steps": 24,
    "train.train_batch": 16,
    "optimizer.learning_rate": 2e-4,
    "eval.every": 4,
    "data.eval_limit": 128,
    "checkpoint.every": 0,
    "checkpoint.keep_best": 0,
    "probe.every": 0,
    "loss.kl": 0.0,
}


class Curve(NamedTuple):
    """Held-out accuracy of one run: step -> accuracy."""

    recipe: str
    points: dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=sorted(recipes.__all__))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/losses"))
    parser.add_argument("--picture", type=Path, default=Path("runs/losses/losses.png"))
    options = parser.parse_args()
    curves = []
    for seed, recipe in ((seed, recipe) for seed in options.seeds for recipe in options.recipes):
        own = {"loss.name": recipe, "seed": seed, "run_dir": options.out / f"{recipe}-{seed}"}
        entries = trained(CONFIGS / "quickstart.toml", BUDGET | own | quickstart(options.base))
        curves.append(Curve(recipe, accuracies(entries)))
    draw(curves, options.picture)
    print(table(curves))


def table(curves: Sequence[Curve]) -> str:
    """Formats final and average accuracy as Markdown: mean over seeds (minimum to maximum)."""
    lines = ["| recipe | at the end, % | over the run, % |", "| --- | --- | --- |"]
    for recipe in sorted({c.recipe for c in curves}):
        values = [list(c.points.values()) for c in curves if c.recipe == recipe]
        end, area = ([100 * of(v) for v in values] for of in (lambda v: v[-1], fmean))
        lines.append(f"| `{recipe}` | {_spread(end)} | {_spread(area)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def draw(curves: Sequence[Curve], path: Path, *, beside: str = "grpo") -> None:
    """Draws a panel for each recipe: its seeds, their mean, and in grey the mean of `beside`."""
    names = sorted({c.recipe for c in curves})
    columns = 6
    rows = -(-len(names) // columns)
    figure = matplotlib.figure.Figure(figsize=(2.4 * columns, 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    grey = [c for c in curves if c.recipe == beside]
    for axis, name in zip(axes, names, strict=False):
        own = [c for c in curves if c.recipe == name]
        for c in own:
            axis.plot(
                list(c.points), list(c.points.values()), color="tab:blue", alpha=0.35, linewidth=0.8
            )
        for these, color in ((grey, "0.6"), (own, "tab:blue")):
            if these:
                means = [fmean(v) for v in zip(*(c.points.values() for c in these), strict=True)]
                axis.plot(list(these[0].points), means, color=color, linewidth=1.6)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for axis in list(figure.axes)[len(names) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out accuracy, greedy", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


if __name__ == "__main__":
    main()
