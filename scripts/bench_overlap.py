"""Compares taking turns with overlapping, both with the embedded sampler: seconds per step.

    ./scripts/quickstart.sh
    python scripts/bench_overlap.py [--steps 16] [--repeats 3] [--row-length 144]

The runs alternate: in turn, one step ahead on the learner's device, and one step ahead with a
device for each side. All devices of a CPU share its cores.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from experiments.runs import CONFIGS, parser, quickstart, rollouts

from jaxrl.tracking.tracker import read_metrics

SKIPPED = 3  # first steps, which compile
ARMS = {
    "in turn": {"rollouts.max_staleness": 0},
    "one device": {"rollouts.max_staleness": 1},
    "two devices": {"rollouts.max_staleness": 1, "sampler.devices": 1},
}
PARTS = ("time/step", "time/learn", "time/sample", "time/wait")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=16)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument(
        "--row-length", type=int, help="one completion to a row of this length: more learning"
    )
    options = made.parse_args()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(options.repeats):
            for i, arm in enumerate(ARMS):
                run_dir = Path(directory, f"{i}-{repeat}")
                found[arm].append(measure(options, run_dir, keys=ARMS[arm]))
    turns = median(numbers["time/step"] for numbers in found["in turn"])
    print("| | s per step: median (range) | learning | sampling | waiting | times as fast |")
    print("| --- | --- | --- | --- | --- | --- |")
    for arm, runs in found.items():
        step, learn, sample, wait = ([numbers[part] for numbers in runs] for part in PARTS)
        parts = " | ".join(f"{median(part):.2f}" for part in (learn, sample, wait))
        spread = f"{median(step):.2f} ({min(step):.2f} to {max(step):.2f})"
        print(f"| {arm} | {spread} | {parts} | {turns / median(step):.2f} |")


def measure(
    options: argparse.Namespace, run_dir: Path, *, keys: dict[str, int]
) -> dict[str, float]:
    """Trains a run in a program of its own; returns the mean times of its later steps."""
    changes: dict[str, object] = {
        "run_dir": run_dir,
        **quickstart(options.base),
        "train.steps": options.steps,
        **dict.fromkeys(("checkpoint.every", "eval.every", "probe.every", "samples.every"), 0),
        **keys,
    }
    if options.row_length is not None:
        length = options.row_length
        changes |= {"train.packing": "false", "train.row_length": length}
        changes["train.microbatch_tokens"] = 32 * length
    arguments = [text for key, value in changes.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "jaxrl.cli", "train", str(CONFIGS / "quickstart.toml")]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    steps = rollouts(read_metrics(run_dir / "metrics.jsonl"))[SKIPPED:]
    return {part: mean(e.get(part, 0.0) for e in steps) for part in PARTS}


if __name__ == "__main__":
    main()
