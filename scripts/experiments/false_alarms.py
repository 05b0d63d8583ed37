"""Trains the quickstart with several seeds and counts the alarms of these healthy runs.

    ./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
    python scripts/experiments/false_alarms.py [--seeds 0 1 2] [--windows 10 20] [--steps 60]

Runs are kept under --out; rerun the same command to resume.
"""

from pathlib import Path

from runs import CONFIGS, accuracies, parser, quickstart, trained

from jaxrl.diagnostics.alarms.check import replay_alarms
from jaxrl.diagnostics.alarms.limits import Limits


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    made.add_argument("--windows", nargs="+", type=int, default=[10, 20])
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--out", type=Path, default=Path("runs/false_alarms"))
    options = made.parse_args()
    for seed in options.seeds:
        own = {"seed": seed, "run_dir": options.out / str(seed), "train.steps": options.steps}
        entries = trained(CONFIGS / "quickstart.toml", own | quickstart(options.base))
        first, *_, last = accuracies(entries).values()
        for window in options.windows:
            found = replay_alarms(entries, Limits(warmup=window, window=window))
            alarms = "; ".join(f"step {a.step} {a.name}: {a.text}" for a in found)
            print(
                f"seed {seed}: {first:.3f} -> {last:.3f}, window {window}: {len(found)} alarms "
                f"{alarms}",
                flush=True,
            )


if __name__ == "__main__":
    main()
