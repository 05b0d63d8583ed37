"""Trains while learner and servers are killed at random, then trains undisturbed for comparison.

    ./scripts/quickstart.sh && ./scripts/install_vllm.sh
    python scripts/experiments/soak.py runs/soak [--steps 300] [--between 20 60] [--seed 0]

Fails if a step is missing or double, if the sampled rollouts are not the sum of trained, dropped
and waiting ones, or do not match the prompts taken. A kill counts once its process is gone.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from runs import CONFIGS, Entries, accuracies, parser, quickstart, rollouts

from jaxrl.bridge import VllmServer, free_port
from jaxrl.tracking.tracker import read_metrics

COMMAND = [sys.executable, "-m", "jaxrl.cli"]
SERVERS = 2


def main() -> None:
    made = parser(__doc__)
    made.add_argument("directory", type=Path)
    made.add_argument("--steps", type=int, default=300)
    made.add_argument("--between", type=float, nargs=2, default=(20.0, 60.0), metavar="SECONDS")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with servers(options) as ports:
        for name, between in (("killed", options.between), ("undisturbed", None)):
            found = soak(options, options.directory / name, ports=ports, between=between)
            print(f"{name}: {found}", flush=True)


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[list[int]]:
    """Runs servers that restart after a failure; yields their ports."""
    first, log = free_port("127.0.0.1", 0), options.directory / "vllm.log"
    command = [*COMMAND, "serve", str(options.base / "sft" / "model"), "--dtype", "f32"]
    command += ["--port", str(first), "--replicas", str(SERVERS)]
    command += ["--max_model_len", "64", "--log", str(log)]
    with subprocess.Popen(command) as supervisor:
        try:
            ports = [first + i for i in range(SERVERS)]
            while not all(_healthy(port) for port in ports):
                if supervisor.poll() is not None:
                    raise RuntimeError(f"the servers did not start; see {log}")
                time.sleep(1)
            yield ports
        finally:
            supervisor.terminate()


def soak(
    options: argparse.Namespace,
    run_dir: Path,
    *,
    ports: Sequence[int],
    between: Sequence[float] | None,
) -> dict[str, Any]:
    """Trains to the end. Kills a process, and restarts it, every `between` seconds (a range to draw
    from; None kills none). Run and kills have the same seed.

    Raises:
      RuntimeError: if the run fails for another reason, or its counts do not add up.
    """
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    keys = {
        "seed": str(options.seed),
        "run_dir": str(run_dir),
        **quickstart(options.base),
        "sampler.url": json.dumps(urls),
        "sampler.timeout": "60",
        "train.steps": str(options.steps),
        "checkpoint.every": "1",
        "probe.every": "0",
        "eval.every": "0",
    }
    command = [*COMMAND, "train", str(CONFIGS / "quickstart_async.toml")]
    command += [word for key, value in keys.items() for word in (f"--{key}", value)]
    chance, killed, start = random.Random(options.seed), Counter[str](), time.monotonic()
    while True:
        learner = subprocess.Popen(command)
        while between is not None and learner.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                learner.wait(chance.uniform(*between))
                break
            port = chance.choice([None, *ports])
            # One server must survive, otherwise the run ends with an error.
            if port is not None and all(_healthy(other) for other in ports):
                killed["server"] += _kill_server(port)
            else:
                learner.kill()
                killed["learner"] += learner.wait() == -signal.SIGKILL  # it may have ended before
            print(f"killed so far: {dict(killed)}", flush=True)
        if learner.wait() == 0:
            break
        if learner.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with status {learner.returncode}")
    entries = read_metrics(run_dir / "metrics.jsonl")
    _check(entries, steps=options.steps)
    _check_position(run_dir, steps=options.steps)
    made = rollouts(entries)
    return {
        "minutes": (time.monotonic() - start) / 60,
        "killed": dict(killed),
        "reward of the last 10 steps": fmean(e["reward"] for e in made[-10:]),
        "accuracy": list(accuracies(entries).values())[-1],
        "groups made": int(made[-1]["rollouts/sampled"]),
        "trained on": int(made[-1]["rollouts/trained"]),
        "dropped as stale": int(made[-1]["rollouts/stale"]),
    }


def _healthy(port: int) -> bool:
    return VllmServer(f"http://127.0.0.1:{port}", timeout=5.0).healthy()


def _kill_server(port: int) -> bool:
    """Kills all processes of the server on a port; returns True once it is gone."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            if "vllm.entrypoints.openai.api_server" in words and str(port) in words:
                os.killpg(os.getpgid(int(entry.name)), signal.SIGKILL)
    until = time.monotonic() + 5.0
    while (there := _healthy(port)) and time.monotonic() < until:
        time.sleep(0.1)
    return not there


def _check(entries: Entries, *, steps: int) -> None:
    trained = rollouts(entries)
    if [e["step"] for e in trained] != list(range(1, steps + 1)):
        raise RuntimeError(f"steps are missing or double: {[e['step'] for e in trained]}")
    for e in trained:
        parts = {k: e[f"rollouts/{k}"] for k in ("trained", "stale", "zero_variance", "waiting")}
        if e["rollouts/sampled"] != sum(parts.values()):
            raise RuntimeError(f"step {e['step']}: {e['rollouts/sampled']} made, and {parts}")
        if parts["trained"] != e["step"] * trained[0]["rollouts/trained"]:
            raise RuntimeError(f"step {e['step']}: {parts['trained']} groups trained on")


def _check_position(run_dir: Path, *, steps: int) -> None:
    """Checks that each prompt taken was sampled once or is still being sampled."""
    saved = run_dir / "checkpoints" / str(steps) / "host" / "metadata"
    host = json.loads(saved.read_text())["host"]
    sampled, running = host["counts"]["sampled"], len(host["running"])
    if host["position"] != sampled + running:
        raise RuntimeError(f"{host['position']} prompts, {sampled} sampled, {running} running")


if __name__ == "__main__":
    main()
