"""Trains for 10,000 steps with and without a KL term and plots the gradient norm.

    ./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
    python scripts/experiments/long_run.py runs/long [--kl 0.0 0.001] [--picture FILE]

Rerun the same command to resume.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import matplotlib.figure
from runs import CONFIGS, Entries, markdown, parser, quickstart, rollouts, trained

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
LARGEST = "largest gradient norm"
Course = Mapping[str, list[float]]  # by stretch of steps: the last one, and means by SHOWN's titles


def main() -> None:
    made = parser(__doc__)
    made.add_argument("directory", type=Path)
    made.add_argument("--kl", nargs="+", default=["0.0", "0.001"])
    made.add_argument("--steps", type=int, default=10_000)
    made.add_argument("--picture", type=Path, default=Path("runs/long/long_run.png"))
    options = made.parse_args()
    courses = {}
    for kl in options.kl:
        own = {"loss.kl": kl, "train.steps": options.steps}
        own |= {"run_dir": options.directory / f"kl-{kl}"}
        entries = trained(CONFIGS / "quickstart.toml", KEYS | own | quickstart(options.base))
        courses[kl] = course(rollouts(entries), stretch=max(1, options.steps // 100))
    draw(courses, options.picture)
    print(table(courses), end="")


def course(entries: Entries, *, stretch: int) -> Course:
    """Averages a run over stretches of steps."""
    for e in entries:
        e["clip"] = e["clip/low"] + e["clip/high"]
    parts = [entries[i : i + stretch] for i in range(0, len(entries), stretch)]
    found = {
        title: [fmean(e[name] for e in part) for part in parts] for name, title in SHOWN.items()
    }
    found[LARGEST] = [max(e["grad_norm"] for e in part) for part in parts]
    return found | {"step": [part[-1]["step"] for part in parts]}


def table(courses: Mapping[str, Course]) -> str:
    """Formats the first, middle and last stretch of each run as Markdown."""
    rows = []
    for kl, one in courses.items():
        for metric in (*SHOWN.values(), LARGEST):
            values = one[metric]
            shown = {"first": values[0], "middle": values[len(values) // 2], "last": values[-1]}
            cells = {place: f"{value:.3g}" for place, value in shown.items()}
            rows.append({"KL coefficient": kl, "metric": metric} | cells)
    return markdown(rows)


def draw(courses: Mapping[str, Course], path: Path) -> None:
    """Draws a panel for each metric with a line for each run."""
    figure = matplotlib.figure.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
        colors = ("tab:orange", "tab:blue", "tab:green")
        for color, (kl, one) in zip(colors, courses.items(), strict=False):
            axis.plot(one["step"], one[title], color=color, label=f"KL {kl}")
            if name == "grad_norm":
                axis.plot(one["step"], one[LARGEST], color=color, alpha=0.4, linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("step", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


if __name__ == "__main__":
    main()
