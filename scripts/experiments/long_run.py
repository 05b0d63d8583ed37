"""Trains for 10,000 steps with and without a KL term and plots the gradient norm.

    ./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
    python scripts/experiments/long_run.py runs/long [--kl 0.0 0.001] [--picture FILE]

Rerun the same command to resume.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib.figure
from runs import CONFIGS, Entries, quickstart, rollouts, trained

# Small steps, so that there can be many; two updates each, so that tokens can be clipped.
KEYS = {
    "train.train_batch": 4,
    "train.group_size": 4,
    "train.updates_per_rollout": 2,
    "train.microbatch_tokens": 768,
    "sampling.max_batch": 16,
    "eval.every": 1000,
    "data.eval_limit": 128,
    "checkpoint.every": 1000,
    "checkpoint.keep_best": 0,
    "probe.every": 0,
    "samples.every": 0,
}
SHOWN = {
    "grad_norm": "gradient norm",
    "clip": "share of tokens that are clipped",
    "entropy/sampled": "entropy, from the sampled tokens",
    "reward": "reward",
}


class Course(NamedTuple):
    """A run in stretches of steps."""

    kl: str  # KL coefficient
    steps: list[int]  # last step of each stretch
    means: dict[str, list[float]]  # mean of each metric of SHOWN over each stretch
    largest: list[float]  # largest gradient norm of each stretch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--kl", nargs="+", default=["0.0", "0.001"])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--picture", type=Path, default=Path("runs/long/long_run.png"))
    options = parser.parse_args()
    courses = []
    for kl in options.kl:
        own = {"loss.kl": kl, "train.steps": options.steps}
        own |= {"run_dir": options.directory / f"kl-{kl}"}
        entries = trained(CONFIGS / "quickstart.toml", KEYS | own | quickstart(options.base))
        courses.append(course(kl, rollouts(entries), stretch=max(1, options.steps // 100)))
    draw(courses, options.picture)
    print(table(courses))


def course(kl: str, entries: Entries, *, stretch: int) -> Course:
    """Averages a run over stretches of steps."""
    for e in entries:
        e["clip"] = e["clip/low"] + e["clip/high"]
    parts = [entries[i : i + stretch] for i in range(0, len(entries), stretch)]
    means = {name: [fmean(e[name] for e in part) for part in parts] for name in SHOWN}
    largest = [max(e["grad_norm"] for e in part) for part in parts]
    return Course(kl, [part[-1]["step"] for part in parts], means, largest)


def table(courses: Sequence[Course]) -> str:
    """Formats the first, middle and last stretch of each run as Markdown."""
    lines = [
        "| KL coefficient | metric | first | middle | last |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in courses:
        for name, values in (one.means | {"largest gradient norm": one.largest}).items():
            shown = (values[0], values[len(values) // 2], values[-1])
            cells = " | ".join(f"{value:.3g}" for value in shown)
            lines.append(f"| {one.kl} | {SHOWN.get(name, name)} | {cells} |")
    return "\n".join(lines)


def draw(courses: Sequence[Course], path: Path) -> None:
    """Draws a panel for each metric with a line for each run."""
    figure = matplotlib.figure.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
        for color, one in zip(("tab:orange", "tab:blue", "tab:green"), courses, strict=False):
            axis.plot(one.steps, one.means[name], color=color, label=f"KL {one.kl}")
            if name == "grad_norm":
                axis.plot(one.steps, one.largest, color=color, alpha=0.4, linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("step", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


if __name__ == "__main__":
    main()
