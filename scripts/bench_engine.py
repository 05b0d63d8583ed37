"""Measures what a fleet's engine costs a step, and what workers save of a slow reward.

    python scripts/bench_engine.py step runs/engine [--base runs/quickstart] [--steps 15]
    python scripts/bench_engine.py reward runs/engine [--seconds 1]

`step` trains the quickstart (scripts/quickstart.sh writes it to --base) without an engine, with
Ray, and with Ray and a worker that computes the rewards, in turn: the seconds of its steps, and
the processor time of the learner's process for a step and of all other processes, which is the
engine's. All three compute the same numbers. `reward` trains a tiny model with 16 completions a
step, whose reward sleeps, or computes, for --seconds each, on one worker and on two. Ray runs on
this machine. The first steps load compiled programs and do not count.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import small_run
from benchmarks.timing import options, write
from experiments.runs import CONFIGS, exit_on_sigterm, quickstart

from jaxrl.tracking.tracker import read_metrics

ENGINES = {
    "none": {},
    "ray": {"fleet.engine": "ray"},
    "ray, a worker": {"fleet.engine": "ray", "fleet.workers": "1"},
}
LOADED = 5  # steps of the quickstart that load programs
REWARDS = """
import time

def sleep(completion, example):
    time.sleep(SECONDS)
    return float(len(completion) % 2)

def compute(completion, example):
    start = time.thread_time()
    while time.thread_time() < start + SECONDS:
        pass
    return float(len(completion) % 2)
"""


def main() -> None:
    parser = options(__doc__, repetitions=4)
    parser.add_argument("what", choices=["step", "reward"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=15, help="of a run of the quickstart")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a reward")
    given = parser.parse_args()
    exit_on_sigterm()
    write(compare_steps(given) if given.what == "step" else compare_rewards(given), given.out)


class Used(NamedTuple):
    """Time that a run took after its first steps."""

    seconds: list[float]  # of each step
    learner: float  # processor seconds of the learner's process for a step
    others: float  # of the command's other processes


def compare_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Returns by engine, for each round, the seconds of a step and the processor time for it."""
    keys = quickstart(given.base) | {"train.steps": str(given.steps)}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ENGINES}
    for _ in range(given.repetitions):
        for name, engine in ENGINES.items():
            used = run(given.directory / "step", keys | engine, first=LOADED)
            row = {
                "seconds": statistics.median(used.seconds),
                "learner": used.learner,
                "others": used.others,
            }
            for label, value in row.items():
                found[name].setdefault(label, []).append(value)
    return found


def compare_rewards(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of a step by reward and number of workers, and their ratio."""
    material, run_dir = given.directory / "material", given.directory / "reward"
    small_run.write_material(material)
    (material / "slow.py").write_text(REWARDS.replace("SECONDS", str(given.seconds)))
    found: dict[str, Any] = {}
    for reward in ("sleep", "compute"):
        seconds = {}
        for workers in (1, 2):
            keys = dict(small_run.overrides(material, run_dir, steps=4)) | {
                "reward.path": f"{material / 'slow.py'}:{reward}",
                "train.dynamic_sampling_rounds": "0",
                "eval.every": "0",
                "fleet.engine": "ray",
                "fleet.learner_resources": "CPU=0.1",  # it waits while rewards are computed
                "fleet.workers": str(workers),
                "fleet.worker_resources": "CPU=0.5",
            }
            seconds[workers] = run(run_dir, keys, first=1).seconds
        medians = {workers: statistics.median(values) for workers, values in seconds.items()}
        found[reward] = {"seconds of a step": seconds, "two of one": medians[2] / medians[1]}
    return found


def run(run_dir: Path, keys: Mapping[str, str], *, first: int) -> Used:
    """Trains in a new process, and watches it after the first steps."""
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [f"--{key}={value}" for key, value in (keys | {"run_dir": str(run_dir)}).items()]
    file = [str(CONFIGS / "quickstart.toml")] if "reward.path" not in keys else []
    command = [sys.executable, "-m", "jaxrl.cli", "train", *file, *overrides]
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    spent: dict[int, Sequence[float]] = {}  # processor time by the number of steps that are done
    with subprocess.Popen(command, env=alone, stdout=sys.stderr) as process:
        try:
            while process.poll() is None:
                if (done := len(steps(run_dir))) >= first and done not in spent:
                    with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
                        spent[done] = processor_time(process.pid)
                time.sleep(0.05)
        finally:
            process.terminate()  # if this program is to end
    if process.returncode:
        raise RuntimeError(f"{command} ended with status {process.returncode}")
    seconds = steps(run_dir)
    early, late = min(spent), max(done for done in spent if done < len(seconds))
    learner, others = (
        (end - begin) / max(1, late - early)
        for begin, end in zip(spent[early], spent[late], strict=True)
    )
    return Used(seconds[first:], learner, others)


def steps(run_dir: Path) -> list[float]:
    """Returns the seconds of the steps that are done."""
    path = run_dir / "metrics.jsonl"
    return [e["time/step"] for e in read_metrics(path) if "time/step" in e]


def processor_time(pid: int) -> Sequence[float]:
    """Returns the processor seconds of the learner's process and of the others of a command."""
    command = psutil.Process(pid)
    family = [command, *command.children(recursive=True)]
    learners = [one for one in family if one.cmdline()[1:4] == ["-m", "jaxrl", "train"]]
    learner = learners[0] if learners else command
    spent = {one.pid: sum(one.cpu_times()[:2]) for one in family}
    return spent[learner.pid], sum(spent.values()) - spent[learner.pid]


if __name__ == "__main__":
    main()
