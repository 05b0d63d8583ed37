"""Kills parts of a fleet at random, and compares what it trained with an undisturbed one.

    python scripts/fleet_kills.py runs/fleet_kills [--kills 30] [--steps 20] [--seed 0] [--servers]

Needs jaxrl[ray], and no model. Ray runs as four nodes on this machine, whose head holds nothing: a
learner of two hosts and two workers that compute rewards. With --servers, which needs vLLM and
jaxrl[store], the workers play whole groups from two vLLM servers. Each kill hits a worker, a
learner host, a server, or a whole node but the head, which another one replaces. Each run has to
end by itself; then every file that does not hold times must be the same, bit for bit: parameters
and optimizer state, the exported model, metrics, samples. So no group is lost and none is trained
on twice. Exits with status 1 otherwise.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import small_run
from experiments.runs import plain_parser

from jaxrl.fleet.engine import import_ray

NODES = 3
NODE = {"num_cpus": 2, "resources": {"L": 1}}
KEYS = {
    "fleet.engine": "ray",
    "fleet.learners": "2",
    "fleet.learner_resources": "CPU=1,L=1",
    "fleet.workers": "2",
    "fleet.restarts": "1000",
    "fleet.wait": "120",
    "mesh.fsdp": "2",
}
SERVED = {
    "sampler.name": "vllm",
    "sampler.timeout": "60",
    "fleet.servers": "2",
    # This model writes few digits; after larger steps it writes none, and its gradients are zero.
    "optimizer.learning_rate": "1e-4",
}
PATIENCE = 600.0  # seconds for the rest of a run after its last kill
GRACE = 10.0  # seconds in which a run that is broken off may end by itself


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", action="store_true")
    options = parser.parse_args()
    head = {"head_dim": 32} if options.servers else {}  # vLLM on a CPU has no smaller heads
    small_run.write_material(options.directory / "material", **head)
    import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(NODES):
            add_node(cluster)
        os.environ["RAY_ADDRESS"] = cluster.address
        return loop(options, Killer(cluster, options.seed, servers=options.servers))
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> None:
    """Adds a node; a SIGTERM still ends this program and with it all nodes."""
    cluster.add_node(**NODE)
    # Ray's own handler, which each node installs, would first drain that node for half a minute.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class Killer:
    """Kills parts of the fleet of a run, by chance."""

    def __init__(self, cluster: Any, seed: int, *, servers: bool) -> None:
        self._cluster, self.chance = cluster, random.Random(seed)
        self._find = {"worker": is_worker, "learner host": is_learner}
        self._find |= {"server": is_server} if servers else {}

    def kill(self) -> str | None:
        """Kills a part; returns its kind, or None if none of the kind drawn runs."""
        kind = self.chance.choice([*self._find, "node"])
        if kind == "node":
            nodes = [node for node in self._cluster.list_all_nodes() if not node.head]
            self._cluster.remove_node(self.chance.choice(nodes), allow_graceful=False)
            add_node(self._cluster)
            return kind
        found = [process for process, words in processes() if self._find[kind](words)]
        if not found:
            return None
        try:
            self.chance.choice(found).kill()
        except psutil.NoSuchProcess:
            return None
        return kind


def is_worker(words: Sequence[str]) -> bool:
    """Tells a worker by its command line."""
    return words[0].startswith("ray::Worker")


def is_learner(words: Sequence[str]) -> bool:
    """Tells a learner host by its command line."""
    return "--hosts.process" in words


def is_server(words: Sequence[str]) -> bool:
    """Tells a server of the fleet by its command line, which starts and watches vLLM."""
    return list(words[1:4]) == ["-m", "jaxrl", "serve"]


def processes() -> list[tuple[psutil.Process, list[str]]]:
    """Lists the processes below this one with their command lines: those of its Ray alone."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found.append((process, process.cmdline() or [""]))
        except psutil.NoSuchProcess:
            continue
    return found


def loop(options: argparse.Namespace, killer: Killer) -> int:
    """Disturbs runs until the number of kills is reached; returns the exit status."""
    undisturbed = options.directory / "undisturbed"
    run(options, undisturbed, killer, kills=0)
    killed, finished, status = Counter[str](), 0, 0
    while killed.total() < options.kills:
        run_dir = options.directory / f"killed_{finished}"
        killed += run(options, run_dir, killer, kills=options.kills - killed.total())
        finished += 1
        different = small_run.differences(run_dir, undisturbed)
        status |= bool(different)
        small_run.report(run_dir, different, killed=killed, finished=finished)
    return status


def run(options: argparse.Namespace, run_dir: Path, killer: Killer, *, kills: int) -> Counter[str]:
    """Runs a fleet to its end, with up to `kills` kills; counts them by what they hit.

    Raises:
      RuntimeError: if the run does not end by itself, or with an error.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    material, log = options.directory / "material", run_dir.with_suffix(".log")
    keys = KEYS | (SERVED if options.servers else {})
    command = small_run.command(material, run_dir, steps=options.steps, further=keys)
    killed = Counter[str]()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while killed.total() < kills and process.poll() is None:
            wait(process, run_dir, chance=killer.chance)
            if process.poll() is None and (kind := killer.kill()) is not None:
                killed[kind] += 1
                print(f"{sum(killed.values())}: {kind} at step {saved(run_dir)}", flush=True)
        status = process.wait(PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the run came no further within {PATIENCE:.0f} s; see {log}") from error
    finally:
        end(process)
    if status != 0:
        raise RuntimeError(f"the run ended with status {status}; see {log}")
    return killed


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a run that still goes on."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait(process: "subprocess.Popen[bytes]", run_dir: Path, *, chance: random.Random) -> None:
    """Waits: one time in four for some seconds, perhaps of a start, else for the next step.

    Raises:
      subprocess.TimeoutExpired: if no step comes.
    """
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, 10))
        return
    before, until = saved(run_dir), time.monotonic() + PATIENCE
    while process.poll() is None and saved(run_dir) == before:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, PATIENCE)
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.5))


def saved(run_dir: Path) -> int:
    """Returns the step of the last checkpoint, 0 without one; every step has one."""
    path = run_dir / "checkpoints"
    names: Sequence[str] = [p.name for p in path.iterdir()] if path.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


if __name__ == "__main__":
    sys.exit(main())
