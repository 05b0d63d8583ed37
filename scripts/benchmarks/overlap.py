"""Runs of the quickstart against a server, with increasing overlap of sampling and training."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from experiments.runs import CONFIGS, accuracies, markdown, quickstart, rollouts, trained

from jaxrl.builders.servers import starting_server
from jaxrl.config.sampler import ServerConfig
from jaxrl.core.precision import parse

# Without a correction the loss treats old completions as new; with it their tokens are reweighted.
CORRECTIONS = {
    "none": {"loss.name": "grpo", "loss.ratio": "over_anchor"},
    "token TIS": {"loss.name": "grpo_token_tis"},
}
# One completion per padded row, so that the learner works as long as the server.
BALANCED = {
    "train.packing": "false",
    "train.row_length": "144",
    "train.microbatch_tokens": "4608",
}
SKIPPED = 3  # first steps, which compile


class Measured(NamedTuple):
    """Measurements of a run."""

    staleness: int
    correction: str
    seed: int
    minutes: float
    # Share of the time that each was busy.
    learner: float
    server: float
    ages: dict[int, int]  # number of steps by mean staleness, rounded
    chi2: float  # mean over steps of E[w^2] - 1 over tokens; w is the importance weight
    gain: float  # mean reward of the last 5 steps less that of the first 5
    accuracy: float

    @property
    def busy_together(self) -> float:
        """Sum of both shares less 1; 0 if they take turns."""
        return self.learner + self.server - 1


@contextmanager
def server(base: Path, *, log: Path) -> Iterator[str]:
    """Starts a server and yields its address."""
    with starting_server(
        ServerConfig(),
        base / "sft" / "model",
        dtype=parse("fp32").sampler,
        log=log,
        note=print,
        max_model_len=64,
    ) as starting:
        yield starting.wait().url


class Setup(NamedTuple):
    """Settings that all runs share; `balanced` gives both sides equal work."""

    base: Path
    url: str
    steps: int
    balanced: bool


def measure(
    directory: Path, setup: Setup, *, staleness: int, correction: str, seed: int
) -> Measured:
    """Measures a run, training it first if `directory` does not have it."""
    name = f"{correction.replace(' ', '-')}-{staleness}-{seed}"
    run_dir = directory / (f"{name}-balanced" if setup.balanced else name)
    keys = {
        "seed": seed,
        "run_dir": run_dir,
        **quickstart(setup.base),
        "sampler.url": json.dumps([setup.url]),
        "rollouts.max_staleness": staleness,
        "train.steps": setup.steps,
        "checkpoint.every": 0,
        "probe.every": 0,
        "eval.every": 0,
        **CORRECTIONS[correction],
        **(BALANCED if setup.balanced else {}),
    }
    entries = trained(CONFIGS / "quickstart_async.toml", keys)
    steps_of = rollouts(entries)
    timed = steps_of[SKIPPED:]
    seconds = sum(e["time/step"] for e in timed)
    sampling = sum(e["time/sample"] for e in timed)
    # Without overlap the learner waits during all of the sampling.
    waiting = sum(e.get("time/wait", e["time/sample"]) for e in timed)
    rewards = [e["reward"] for e in steps_of]
    return Measured(
        staleness=staleness,
        correction=correction,
        seed=seed,
        minutes=seconds / 60,
        learner=1 - waiting / seconds,
        server=min(1.0, sampling / seconds),
        ages=dict(sorted(Counter(round(e.get("staleness", 0)) for e in steps_of).items())),
        chi2=fmean(e["mismatch/chi2"] for e in timed),
        gain=fmean(rewards[-5:]) - fmean(rewards[:5]),
        accuracy=list(accuracies(entries).values())[-1],
    )


def table(runs: Sequence[Measured]) -> str:
    """Formats a Markdown table with a line for each run."""
    return markdown(
        [
            {
                "max_staleness": str(r.staleness),
                "correction": r.correction,
                "seed": str(r.seed),
                "minutes": f"{r.minutes:.2f}",
                "learner busy": f"{r.learner:.0%}",
                "server busy": f"{r.server:.0%}",
                "steps by mean staleness": ", ".join(f"{k}: {n}" for k, n in r.ages.items()),
                "chi2 of a token": f"{r.chi2:.2g}",
                "reward gained": f"{r.gain:.3f}",
                "per minute": f"{r.gain / r.minutes:.3f}",
                "held-out accuracy": f"{r.accuracy:.1%}",
            }
            for r in runs
        ]
    )
