"""Compares taking turns with overlapping: time, utilisation, staleness, reward per minute.

    ./scripts/quickstart.sh && ./scripts/install_vllm.sh
    python scripts/bench_async.py runs/async [--staleness 0 1 3 5 10] [--seeds 0 1] [--steps 30]
    python scripts/bench_async.py runs/async --balanced    equal work for both sides

Learner and server are pinned to one core each. Finished runs are not repeated.
"""

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from statistics import fmean

from experiments.runs import CONFIGS, accuracies, markdown, parser, quickstart, rollouts, trained

from jaxrl.builders.servers import starting_server
from jaxrl.config.sampler import ServerConfig
from jaxrl.core import Precision
from jaxrl.huggingface import Checkpoint

SERVER_CORE, LEARNER_CORE = 1, 0
# Without a correction the loss treats old completions as new; with it their tokens are reweighted.
CORRECTIONS = {
    "none": {"loss.name": "grpo", "loss.ratio": "over_anchor"},
    "token TIS": {"loss.name": "grpo_token_tis"},
}
# One completion per padded row, so that the learner works as long as the server.
BALANCED = {"train.packing": "false", "train.row_length": "144", "train.microbatch_tokens": "4608"}
SKIPPED = 3  # first steps, which compile


def main() -> None:
    made = parser(__doc__)
    made.add_argument("directory", nargs="?", type=Path, default=Path("runs/async"))
    made.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 3, 5, 10])
    made.add_argument("--corrections", nargs="+", default=[*CORRECTIONS])
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--steps", type=int, default=30)
    made.add_argument(
        "--balanced", action="store_true", help="the learner does not pack completions"
    )
    options = made.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {SERVER_CORE})  # inherited by the server
    with starting_server(
        ServerConfig(),
        Checkpoint(options.base / "sft" / "model"),
        dtype=Precision.parse("fp32").sampler,
        log=options.directory / "vllm.log",
        note=print,
        max_model_len=64,
    ) as starting:
        url = starting.wait().url
        os.sched_setaffinity(0, {LEARNER_CORE})  # before JAX starts its threads
        rows = [
            measure(options, url, staleness=staleness, correction=correction, seed=seed)
            # Compared runs follow each other, so that disturbances affect them alike.
            for seed in options.seeds
            for correction in options.corrections
            for staleness in options.staleness
        ]
    print(markdown(rows), end="")


def measure(
    options: argparse.Namespace, url: str, *, staleness: int, correction: str, seed: int
) -> dict[str, str]:
    """Returns a run's line of the table; trains it first if the directory does not have it."""
    name = f"{correction.replace(' ', '-')}-{staleness}-{seed}-{options.steps}"
    keys = {
        "seed": seed,
        "run_dir": options.directory / (f"{name}-balanced" if options.balanced else name),
        **quickstart(options.base),
        "sampler.url": json.dumps([url]),
        "rollouts.max_staleness": staleness,
        "train.steps": options.steps,
        "checkpoint.every": 0,
        "probe.every": 0,
        "eval.every": 0,
        **CORRECTIONS[correction],
        **(BALANCED if options.balanced else {}),
    }
    entries = trained(CONFIGS / "quickstart_async.toml", keys)
    steps = rollouts(entries)
    timed = steps[SKIPPED:]
    seconds = sum(e["time/step"] for e in timed)
    # Without overlap the learner waits during all of the sampling.
    waiting = sum(e.get("time/wait", e["time/sample"]) for e in timed)
    learner = 1 - waiting / seconds
    server = min(1.0, sum(e["time/sample"] for e in timed) / seconds)
    ages = Counter(round(e.get("staleness", 0)) for e in steps)
    rewards = [e["reward"] for e in steps]
    gain = fmean(rewards[-5:]) - fmean(rewards[:5])
    accuracy = list(accuracies(entries).values())[-1]
    return {
        "max_staleness": str(staleness),
        "correction": correction,
        "seed": str(seed),
        "minutes": f"{seconds / 60:.2f}",
        "learner busy": f"{learner:.0%}",
        "server busy": f"{server:.0%}",
        "steps by mean staleness": ", ".join(f"{age}: {n}" for age, n in sorted(ages.items())),
        # Mean of E[w^2] - 1 over tokens; w is the importance weight.
        "chi2 of a token": f"{fmean(e['mismatch/chi2'] for e in timed):.2g}",
        "reward gained": f"{gain:.3f}",
        "per minute": f"{60 * gain / seconds:.3f}",
        "held-out accuracy": f"{accuracy:.1%}",
    }


if __name__ == "__main__":
    main()
