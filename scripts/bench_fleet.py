"""Measures how many groups of a fleet process 0 of the learner admits, receives and packs.

    python scripts/bench_fleet.py runs/fleet [--workers 1 4 16 64 256] [--seconds 20]
        [--picture docs/pictures/fleet.png]

Workers are simulated: each has 4 groups of 8 completions at once, whose episodes sleep 2 s, and
servers write --rate tokens/s in all. The rest is what a run does with `rollouts.max_staleness = 1`:
admission, calls, results, rewards' metrics, advantages, packing, metrics of the step. There is no
model: a step of the learner takes no time. A batch has twice as many groups as are in flight, so
that workers always have some.
With --ray the workers are processes of a real Ray on this machine, which play such groups.

--tokenizer DIR decodes completions with a model's tokenizer; metrics of format need the texts.
"""

import argparse
import json
import os
import pickle
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import small_run
from benchmarks.ray_workers import RayField
from benchmarks.simulated_workers import VERSION, Field, Pace, play_asleep
from benchmarks.timing import write
from experiments.runs import plain_parser
from transformers import AutoTokenizer

from jaxrl.advantages import estimate
from jaxrl.builders.prompts import training_params
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.task import load_task
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core import MinibatchShape, pack_minibatch
from jaxrl.data import Tokenizer
from jaxrl.fleet.workers import Workers
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import NullSampler
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import RolloutBatch, step_metrics
from jaxrl.training.rollouts.generate import RolloutSource
from jaxrl.training.rollouts.groups import GroupWorkers
from jaxrl.training.rollouts.outcomes import shaped_outcomes
from jaxrl.training.rollouts.stream import Stream
from jaxrl.training.timing import Numbers, clock

SLOTS, GROUP = 4, 8  # groups that a worker plays at once, completions of a group
ROW = 2048  # tokens


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, for each number")
    parser.add_argument("--environment", type=float, default=2.0, help="seconds of a group")
    parser.add_argument("--rate", type=float, default=1e7, help="tokens/s of all servers")
    parser.add_argument("--tokens", type=int, default=1000, help="mean length of a completion")
    parser.add_argument("--batch", type=int, help="groups of a step")
    parser.add_argument("--ray", action="store_true", help="real workers")
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    options = parser.parse_args()
    small_run.write_material(options.directory, max_position_embeddings=4 * options.tokens)
    rows = [measure(options, workers=count) for count in options.workers]
    if options.picture is not None:
        draw(rows, options.picture)


def measure(options: argparse.Namespace, *, workers: int) -> dict[str, Any]:
    """Runs a fleet of simulated workers; returns and writes its rates."""
    batch = options.batch or 2 * SLOTS * workers
    config = read_config(options.directory, workers=workers, batch=batch, tokens=options.tokens)
    tokenizer = Checkpoint(config.model.path).tokenizer
    if options.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    pace = Pace(options.environment, options.rate, options.tokens, len(tokenizer))
    field = RayField() if options.ray else Field(pace)
    actors = {str(i): field.actor() for i in range(workers)}
    calls = Workers(lambda: actors, restart=lambda actor: None)
    source, progress = open_source(config, calls, pace=pace), Progress()
    with Stream(source, progress, interrupt=Interrupt()) as stream:
        # The first steps compile, and fill what is in flight.
        steps(stream, source, progress, tokenizer=tokenizer, seconds=2.5 * options.environment)
        before, sent, received = cpu(), field.sent, field.received
        stored = field.stored
        found = steps(stream, source, progress, tokenizer=tokenizer, seconds=options.seconds)
        took = found["seconds"]
        used = {name: (end - before[name]) / took for name, end in cpu().items()}
    calls.close()
    row = {
        "workers": workers,
        "asked": workers * SLOTS * GROUP / options.environment,
        "completions/s": found["groups"] * GROUP / took,
        "groups/s": found["groups"] / took,
        "steps": found["steps"],
        "completions": found["groups"] * GROUP,
        "MB/s to workers": (field.received - received) / took / 1e6,
        "MB/s from workers": (field.sent - sent) / took / 1e6,
        "MB/s through the object store": (field.stored - stored) / took / 1e6,
        "share of time": {name: value / took for name, value in found["parts"].items()},
        "processors": {name: value for name, value in used.items() if value >= 0.005},
        "RSS, MB": psutil.Process().memory_info().rss / 1e6,
        "MB by tenths": found["memory"],
    }
    field.close()
    write(row, options.out)
    return row


def read_config(directory: Path, *, workers: int, batch: int, tokens: int) -> Config:
    """Returns the config of a run whose servers the workers talk to."""
    keys = dict(small_run.overrides(directory, directory / "run", steps=10**9)) | {
        "sampler.name": "vllm",
        "sampler.url": '["http://127.0.0.1:9"]',
        "sampler.max_requests": str(SLOTS * workers),
        "sampling.max_tokens": str(2 * tokens),
        "rollouts.max_staleness": "1",
        "train.train_batch": str(batch),
        "train.group_size": str(GROUP),
        "train.dynamic_sampling_rounds": "0",
        "train.microbatch_tokens": str(8 * ROW),
        "fleet.workers": str(workers),
    }
    return toml_file.load(Config, overrides=list(keys.items()))


class Sampler(NullSampler):
    """Knows the version that the simulated servers have."""

    def __init__(self) -> None:
        self.use(0)

    def use(self, version: int) -> None:
        """Knows of a publish to the one server."""
        self.used = {VERSION: version, "urls": [""]}


def open_source(config: Config, workers: Workers, *, pace: Pace) -> RolloutSource:
    policy = Checkpoint(config.model.path)
    task = load_task(config, policy, splits=("train",))
    sampler: Any = Sampler()
    return RolloutSource(
        config=config,
        task=task,
        sampler=sampler,
        params=training_params(config.sampling, policy, seed=config.seed),
        episode_runner=None,
        reward_model=None,
        teacher=None,
        note=print,
        workers=GroupWorkers(
            workers,
            play_asleep,
            setup=pickle.dumps(pace),
            sampler=sampler,
            weights=task.weights,
            max_requests=config.sampler.max_requests,
        ),
    )


def steps(
    stream: Stream,
    source: RolloutSource,
    progress: Progress,
    *,
    tokenizer: Tokenizer,
    seconds: float,
) -> dict[str, Any]:
    """Takes steps for some time, and at least two; returns counts, and the seconds of each part."""
    sampler: Any = source.sampler
    parts, memory, done, groups = Numbers(), list[float](), 0, 0
    begun = time.monotonic()
    while (past := time.monotonic() - begun) < seconds or done < 2:
        if past * 10 >= seconds * len(memory):
            memory.append(round(psutil.Process().memory_info().rss / 1e6))
        with clock(parts, "wait"):
            collected = stream.collect(seconds={})
        assert collected is not None
        timed = pack(source, collected, tokenizer=tokenizer)
        for name, value in timed.items():
            parts[name] = parts.get(name, 0.0) + value
        progress.step += 1
        sampler.use(progress.step)
        done, groups = done + 1, groups + source.config.train.train_batch
    parts["collect"] = parts.pop("wait")
    return {
        "seconds": time.monotonic() - begun,
        "steps": done,
        "groups": groups,
        "parts": parts,
        "memory": memory,
    }


def pack(source: RolloutSource, collected: RolloutBatch, *, tokenizer: Tokenizer) -> Numbers:
    """Makes the minibatch and the metrics of a step; returns the seconds of each part."""
    seconds, rollouts = Numbers(), collected.batch
    with clock(seconds, "advantages"):
        outcomes, _ = shaped_outcomes(
            source.config,
            rollouts,
            weights=source.task.weights,
            logprobs=lambda: ([], []),
            greedy=lambda: np.zeros(0),
        )
        advantages = estimate(make_recipe(source.config).advantages, outcomes)
    with clock(seconds, "pack"):
        shape = MinibatchShape(row_length=ROW, rows_per_microbatch=8)
        jax.block_until_ready(pack_minibatch(rollouts, list(advantages), shape=shape))
    with clock(seconds, "metrics"):
        timed = {"time/step": 1.0, "time/sample": 1.0, "time/learn": 1.0}
        json.dumps(step_metrics(collected, collected.numbers | timed, tokenizer=tokenizer))
    return seconds


def cpu() -> Counter[str]:
    """Returns the seconds of processor time of this process's threads, by their names."""
    names = defaultdict(lambda: "others", {t.native_id: t.name for t in threading.enumerate()})
    found = Counter[str]()
    for thread in psutil.Process().threads():
        found[names[thread.id].split("-")[0]] += thread.user_time + thread.system_time
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws completions/s and the processor time of each part against the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rates, shares) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    counts = [row["workers"] for row in rows]
    asked = [row["asked"] for row in rows]
    rates.loglog(counts, asked, ":", color="gray", label="workers could play")
    rates.loglog(counts, [row["completions/s"] for row in rows], "o-", label="trained on")
    rates.axhline(2000, color="tab:green", linewidth=0.8, label="2,000")
    rates.set_ylabel("completions/s")
    bottom = np.zeros(len(rows))
    for name in dict.fromkeys(name for row in rows for name in row["processors"]):
        values = np.array([row["processors"].get(name, 0.0) for row in rows])
        shares.bar(range(len(rows)), values, bottom=bottom, label=name)
        bottom += values
    shares.set_xticks(range(len(rows)), list(map(str, counts)))
    shares.set_ylabel("processors in use")
    for axes in (rates, shares):
        axes.set_xlabel("workers")
        axes.legend(fontsize=8)
    rates.set_xticks(counts, list(map(str, counts)), minor=False)
    rates.minorticks_off()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
