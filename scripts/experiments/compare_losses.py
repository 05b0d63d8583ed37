"""Trains every recipe on the quickstart's task and plots held-out accuracy.

    ./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
    python scripts/experiments/compare_losses.py [--recipes grpo gspo] [--seeds 0 1 2]

Runs are kept under --out; rerun the same command to resume.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.figure
from runs import CONFIGS, accuracies, markdown, parser, quickstart, spread, trained

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
Curves = Mapping[str, Sequence[Mapping[int, float]]]  # of each recipe's runs: step -> accuracy


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--recipes", nargs="+", default=sorted(recipes.__all__))
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--out", type=Path, default=Path("runs/losses"))
    made.add_argument("--picture", type=Path, default=Path("runs/losses/losses.png"))
    options = made.parse_args()
    curves = {recipe: [] for recipe in sorted(options.recipes)}
    for seed, recipe in ((seed, recipe) for seed in options.seeds for recipe in options.recipes):
        own = {"loss.name": recipe, "seed": seed, "run_dir": options.out / f"{recipe}-{seed}"}
        entries = trained(CONFIGS / "quickstart.toml", BUDGET | own | quickstart(options.base))
        curves[recipe].append(accuracies(entries))
    draw(curves, options.picture)
    print(table(curves), end="")


def table(curves: Curves) -> str:
    """Formats final and average accuracy as Markdown: mean over seeds (minimum to maximum)."""
    rows = []
    for recipe, runs in curves.items():
        values = [list(run.values()) for run in runs]
        end, area = ([100 * of(v) for v in values] for of in (lambda v: v[-1], fmean))
        row = {"recipe": f"`{recipe}`", "at the end, %": spread(end, "{:.0f}")}
        rows.append(row | {"over the run, %": spread(area, "{:.0f}")})
    return markdown(rows)


def draw(curves: Curves, path: Path, *, beside: str = "grpo") -> None:
    """Draws a panel for each recipe: its seeds, their mean, and in grey the mean of `beside`."""
    columns = 6
    rows = -(-len(curves) // columns)
    figure = matplotlib.figure.Figure(figsize=(2.4 * columns, 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axis, (name, own) in zip(axes, curves.items(), strict=False):
        for run in own:
            values = list(run.values())
            axis.plot(list(run), values, color="tab:blue", alpha=0.35, linewidth=0.8)
        for these, color in ((curves.get(beside), "0.6"), (own, "tab:blue")):
            if these:
                means = [fmean(v) for v in zip(*(run.values() for run in these), strict=True)]
                axis.plot(list(these[0]), means, color=color, linewidth=1.6)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for axis in list(figure.axes)[len(curves) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out accuracy, greedy", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


if __name__ == "__main__":
    main()
