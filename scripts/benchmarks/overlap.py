"""Runs of the quickstart against a server, with more and more of the work overlapping."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.quickstart import material

from jaxrl import train
from jaxrl.builders.servers import Workload, started_server
from jaxrl.config import toml_file
from jaxrl.config.sampler import ServerConfig
from jaxrl.config.training import Config
from jaxrl.core.precision import parse
from jaxrl.monitoring.tracking.tracking import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_async.toml"
# Without a correction the loss takes old answers for new ones; with it their tokens are reweighted.
CORRECTIONS = {
    "none": {"loss.name": "grpo", "loss.ratio": "over_anchor"},
    "token TIS": {"loss.name": "grpo_token_tis"},
}
# An answer to a row with much padding, so that the learner's work is as long as the server's.
BALANCED = {
    "train.packing": "false",
    "train.row_length": "144",
    "train.microbatch_tokens": "4608",
}
SKIPPED = 3  # steps at the beginning, which compile


class Measured(NamedTuple):
    """A run.

    Attributes:
      learner, server: share of the time in which each had work to do.
      ages: how many steps had that mean staleness, rounded.
      chi2: mean of E[w^2] - 1 over the tokens of a step; w is the importance weight.
      gain: reward of the last 5 steps less that of the first 5.
    """

    staleness: int
    correction: str
    seed: int
    minutes: float
    learner: float
    server: float
    ages: dict[int, int]
    chi2: float
    gain: float
    accuracy: float

    @property
    def busy_together(self) -> float:
        """The sum of both shares, less 1: 0 where they take turns."""
        return self.learner + self.server - 1


@contextmanager
def server(base: Path, *, log: Path) -> Iterator[str]:
    """The address of a server that is ready."""
    with started_server(
        ServerConfig(),
        base / "sft" / "model",
        work=Workload(parse("fp32").sampler, max_model_len=64),
        log=log,
        note=print,
    ) as started:
        yield started.url


def measure(
    directory: Path,
    *,
    base: Path,
    url: str,
    staleness: int,
    correction: str,
    seed: int,
    steps: int,
    balanced: bool,
) -> Measured:
    """A run, which is trained unless the directory holds it to the end."""
    name = f"{correction.replace(' ', '-')}-{staleness}-{seed}"
    run_dir = directory / (f"{name}-balanced" if balanced else name)
    if not (run_dir / "curves.png").exists():
        keys = {
            "seed": str(seed),
            "run_dir": str(run_dir),
            **material(base),
            "sampler.url": json.dumps([url]),
            "rollouts.max_staleness": str(staleness),
            "train.steps": str(steps),
            "checkpoint.every": "0",
            "probe.every": "0",
            "eval.every": "0",
            **CORRECTIONS[correction],
            **(BALANCED if balanced else {}),
        }
        train.train(toml_file.load(Config, file=CONFIG, overrides=list(keys.items())))
    entries = read_metrics(run_dir / "metrics.jsonl")
    steps_of = [e for e in entries if "reward" in e]
    timed = steps_of[SKIPPED:]
    seconds = sum(e["time/step"] for e in timed)
    sampling = sum(e["time/sample"] for e in timed)
    # In turn, the learner waits for all of the sampling.
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
        accuracy=[e["eval/accuracy"] for e in entries if "eval/accuracy" in e][-1],
    )


def table(runs: Sequence[Measured]) -> str:
    """As Markdown, a line for each run."""
    header = (
        "max_staleness",
        "correction",
        "seed",
        "minutes",
        "learner busy",
        "server busy",
        "steps by mean staleness",
        "chi2 of a token",
        "reward gained",
        "per minute",
        "held-out accuracy",
    )
    lines = [header, ("---",) * len(header)]
    for r in runs:
        ages = ", ".join(f"{age}: {count}" for age, count in r.ages.items())
        lines.append(
            (
                str(r.staleness),
                r.correction,
                str(r.seed),
                f"{r.minutes:.2f}",
                f"{r.learner:.0%}",
                f"{r.server:.0%}",
                ages,
                f"{r.chi2:.2g}",
                f"{r.gain:.3f}",
                f"{r.gain / r.minutes:.3f}",
                f"{r.accuracy:.1%}",
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
