"""A run whose learner and servers are killed again and again, and the same run left in peace."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.quickstart import material

from jaxrl.bridge.servers.control import VllmServer
from jaxrl.monitoring.tracking.tracking import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_async.toml"
COMMAND = [sys.executable, "-m", "jaxrl.cli"]


class Soaked(NamedTuple):
    """What is left of a run.

    Attributes:
      killed: how often whom.
      reward: mean of the last 10 steps.
    """

    minutes: float
    killed: Counter[str]
    reward: float
    accuracy: float
    made: int
    learnt: int
    late: int


@contextmanager
def servers(base: Path, *, count: int, log: Path) -> Iterator[list[int]]:
    """The ports of servers that are started again when they end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    model = str(base / "sft" / "model")
    options = ["--dtype", "f32", "--port", str(first), "--replicas", str(count)]
    options += ["--max_model_len", "64", "--log", str(log)]
    with subprocess.Popen([*COMMAND, "serve", model, *options]) as supervisor:
        try:
            ports = [first + i for i in range(count)]
            while not all(_healthy(port) for port in ports):
                if supervisor.poll() is not None:
                    raise RuntimeError(f"the servers did not start; see {log}")
                time.sleep(1)
            yield ports
        finally:
            supervisor.terminate()


def soak(
    run_dir: Path,
    *,
    base: Path,
    ports: Sequence[int],
    steps: int,
    seed: int,
    between: tuple[float, float] | None,
) -> Soaked:
    """Trains to the end; whoever is killed is started again.

    Args:
      run_dir: of the run.
      base: has the model and the data of the quickstart.
      ports: of the servers.
      steps: of the run.
      seed: of the run, and of who is killed when.
      between: least and most seconds between two deaths; None for none.

    Raises:
      RuntimeError: if the run ends otherwise, or what it has counted does not add up.
    """
    urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in ports)
    keys = {
        "seed": str(seed),
        "run_dir": str(run_dir),
        **material(base),
        "sampler.url": f"[{urls}]",
        "sampler.timeout": "60",
        "train.steps": str(steps),
        "checkpoint.every": "1",
        "probe.every": "0",
        "eval.every": "0",
    }
    command = [*COMMAND, "train", str(CONFIG)]
    command += [word for key, value in keys.items() for word in (f"--{key}", value)]
    chance, killed, start = random.Random(seed), Counter[str](), time.monotonic()
    while True:
        learner = subprocess.Popen(command)
        while between is not None and learner.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                learner.wait(chance.uniform(*between))
                break
            port = chance.choice([None, *ports])
            # One server has to be left, else the run ends and says so.
            if port is not None and all(_healthy(other) for other in ports):
                killed["server"] += 1
                _kill_server(port)
            else:
                killed["learner"] += 1
                learner.kill()
        if learner.wait() == 0:
            break
        if learner.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with status {learner.returncode}")
    entries = read_metrics(run_dir / "metrics.jsonl")
    _check(entries, steps=steps)
    made = [e for e in entries if "reward" in e]
    return Soaked(
        minutes=(time.monotonic() - start) / 60,
        killed=killed,
        reward=sum(e["reward"] for e in made[-10:]) / len(made[-10:]),
        accuracy=[e["eval/accuracy"] for e in entries if "eval/accuracy" in e][-1],
        made=int(made[-1]["rollouts/sampled"]),
        learnt=int(made[-1]["rollouts/trained"]),
        late=int(made[-1]["rollouts/stale"]),
    )


def _healthy(port: int) -> bool:
    return VllmServer(f"http://127.0.0.1:{port}", timeout=5.0).healthy()


def _kill_server(port: int) -> None:
    """All processes of the server, if it is there."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            if "vllm.entrypoints.openai.api_server" in words and str(port) in words:
                os.killpg(os.getpgid(int(entry.name)), signal.SIGKILL)


def _check(entries: Sequence[dict[str, float]], *, steps: int) -> None:
    trained = [e for e in entries if "reward" in e]
    if [e["step"] for e in trained] != list(range(1, steps + 1)):
        raise RuntimeError(f"steps are missing or double: {[e['step'] for e in trained]}")
    for e in trained:
        parts = {k: e[f"rollouts/{k}"] for k in ("trained", "stale", "zero_variance", "waiting")}
        if e["rollouts/sampled"] != sum(parts.values()):
            raise RuntimeError(f"step {e['step']}: {e['rollouts/sampled']} made, and {parts}")
        if parts["trained"] != e["step"] * trained[0]["rollouts/trained"]:
            raise RuntimeError(f"step {e['step']}: {parts['learnt']} groups learnt from")
