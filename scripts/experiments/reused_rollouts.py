"""Compares runs that use a rollout batch longer: many optimizer steps on it, with and without
`train.max_kl`, and groups that are trained on twice, by `rollouts.replay_share`.

    ./scripts/quickstart.sh
    python scripts/experiments/reused_rollouts.py runs/reused

Finished runs are not repeated.
"""

from pathlib import Path
from statistics import fmean

from runs import CONFIGS, accuracies, markdown, parser, quickstart, rollouts, trained

STEPS = 30
# The quickstart has 2 updates at 1e-4; eight at five times that go far from the sampling policy.
MANY = {"train.updates_per_rollout": 8, "optimizer.learning_rate": 5e-4, "loss.kl": 0}
RUNS = {
    "8 updates": MANY,
    "8 updates, max_kl .05": MANY | {"train.max_kl": 0.05},
    "8 updates, max_kl .02": MANY | {"train.max_kl": 0.02},
    "8 updates, max_kl .005": MANY | {"train.max_kl": 0.005},
    "2 updates": {},
    "2 updates, replay_share .5": {"rollouts.replay_share": 0.5},
    "2 updates, replay_share .75": {"rollouts.replay_share": 0.75},
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("directory", nargs="?", type=Path, default=Path("runs/reused"))
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    rows = []
    for name, changes in RUNS.items():
        words = name.replace(",", "").replace(" ", "-")
        keys = {
            "seed": options.seed,
            "run_dir": options.directory / f"{words}-{options.seed}",
            **quickstart(options.base),
            "train.steps": STEPS,
            "probe.every": 0,
            **changes,
        }
        entries = trained(CONFIGS / "quickstart.toml", keys)
        steps, held_out = rollouts(entries), accuracies(entries)
        updates = int(str(changes.get("train.updates_per_rollout", 2)))
        far = [e["mismatch/k3_kl"] for e in steps]
        taken = sum(updates - e.get("update/left_out", 0) for e in steps)
        rows.append(
            {
                "run": name,
                "held-out accuracy after 5, 10, 20, 30": ", ".join(
                    f"{100 * held_out[step]:.1f}" for step in (5, 10, 20, STEPS)
                ),
                "optimizer steps": f"{taken:.0f}",
                "groups sampled": f"{sum(e['groups/sampled'] for e in steps):.0f}",
                "k3 KL to the sampler, mean, largest": f"{fmean(far):.4f}, {max(far):.3f}",
                "clipped": f"{fmean(e['clip/low'] + e['clip/high'] for e in steps):.3f}",
                "largest gradient norm": f"{max(e['grad_norm'] for e in steps):.1f}",
            }
        )
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
