"""Trains with servers on three hosts while everything fails at random, and judges what is left.

    ./scripts/quickstart.sh && ./scripts/install_vllm.sh
    python scripts/soak.py runs/soak [--minutes 120] [--seed 0] [--base runs/quickstart]

An asynchronous run publishes through a web store. Each host is `jaxrl serve` behind links of its
own, to the learner and to the store. Every few seconds one of these is drawn: the learner, a server
or an agent is killed; the learner is suspended for longer than its lease; objects in the store are
damaged or deleted; a link swallows what it carries; the store is down, or its disk is full. Clocks
do not step here; `tests/bridge/protocol` has that.

Checked all the time: servers that report the same version have the same weights, bit for bit, and
give the same greedy tokens. In the end faults stop, and: no step is missing or double, the groups
sampled are those trained on, dropped or waiting; all servers have the weights of the last version,
bit for bit those of a server on the exported checkpoint; memory and descriptors of processes are
level, so in the last eight minutes no process is killed. Exits with status 1 otherwise. The same
seed draws the same faults.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.link import Link
from experiments.runs import CONFIGS, exit_on_sigterm, markdown, parser, quickstart
from soaking import judge
from soaking.hosts import COMMAND, KEY, LEASE, Host, Seen, host, wait_for
from soaking.store import FaultyStore

HOSTS = 3
QUIET = 75.0  # seconds without a new fault at the end
STALENESS = 1
_LOOK, _COMPARE = 2.0, 30.0  # seconds between two looks at the processes, and at the servers
_WARM = 5  # steps of a learner before its memory counts
_PATIENCE = 1200.0  # seconds for all servers to come back and to answer, on a busy machine
_FOREVER = 1_000_000  # steps


class Soak:
    """A run, its hosts and the store."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        """Starts store and hosts, and waits until the servers are ready."""
        self.options, self.run_dir = options, options.directory / "run"
        self.store = stack.enter_context(FaultyStore())
        self.link = stack.enter_context(Link(self.store.port))  # of the learner
        model = options.base / "sft" / "model"
        log = options.directory / "logs"
        self.hosts = [
            stack.enter_context(host(model, store=self.store.port, log=log / f"vllm-{i}.log"))
            for i in range(HOSTS)
        ]
        wait_for(self.hosts, log=log / "vllm.log")
        self.output = stack.enter_context((log / "learner.log").open("ab"))
        self.usage = judge.Usage(log / "usage.jsonl")
        self.faults, self.ends = Counter[str](), Counter[str]()
        self.versions: dict[str, Seen] = {}
        self.wrong: list[str] = []
        self.compared = 0.0
        self.begun = self.said = 0  # last step, and bytes of output, when the learner started
        self.learner = self.start()
        stack.callback(lambda: self.learner.kill())
        self.over = threading.Event()
        stack.callback(self.over.set)
        threading.Thread(target=self._look, daemon=True).start()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts or resumes the learner."""
        keys = {
            "seed": str(self.options.seed),
            "run_dir": str(self.run_dir),
            **quickstart(self.options.base),
            "sampler.url": json.dumps([one.url for one in self.hosts]),
            "sampler.store": f"http://127.0.0.1:{self.link.port}/soak",
            "sampler.timeout": "60",
            "rollouts.max_staleness": str(STALENESS),
            "train.steps": str(_FOREVER),
            "checkpoint.every": "1",
            "probe.every": "0",
            "eval.every": "0",
        }
        command = [*COMMAND, "train", str(CONFIGS / "quickstart_async.toml")]
        command += [word for key, value in keys.items() for word in (f"--{key}", value)]
        environment = os.environ | {"JAXRL_API_KEY": KEY}
        self.begun, self.said = self.step(), Path(self.output.name).stat().st_size
        return subprocess.Popen(command, env=environment, stdout=self.output, stderr=self.output)

    def step(self) -> int:
        """Returns the last step that is recorded."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b'"reward"') if path.exists() else 0

    def watch(self, seconds: float) -> None:
        """Looks at everything for some seconds; resumes a learner that has ended."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if (status := self.learner.poll()) is not None:
                self._ended(status)
            if now > self.compared + _COMPARE:
                self.compared = now
                self.compare()
            time.sleep(max(0.0, min(0.5, end - now)))

    def _ended(self, status: int) -> None:
        if status == -signal.SIGKILL:
            self.ends["killed"] += 1
        else:
            output = Path(self.output.name).read_bytes()[self.said :]
            said = output.decode(errors="replace").rstrip().splitlines()
            self.ends[f"status {status}: {said[-1][:300] if said else ''}"] += 1
            if judge.crashed(status, said):
                self.wrong.append(f"the learner ended with status {status}; see {self.output.name}")
        while not any(one.healthy() for one in self.hosts):
            time.sleep(1)
        self.learner = self.start()

    def _look(self) -> None:
        while not self.over.wait(_LOOK):
            now = time.monotonic()
            if self.step() >= self.begun + _WARM:
                self.usage.sample("learner", [self.learner.pid], time=now)
            for one in self.hosts:
                self.usage.sample("jaxrl serve", [one.process.pid], time=now)
                self.usage.sample("agent", one.agent(), time=now)
                self.usage.sample("server", one.worked(), time=now)

    def compare(self) -> list[Seen | None]:
        """Compares the servers with all that had the same version; returns their states."""
        found = [one.look() for one in self.hosts]
        for i, seen in enumerate(found):
            if seen is not None and seen != self.versions.setdefault(seen.label, seen):
                self.wrong.append(f"host {i}: version {seen.label} is not what it was elsewhere")
        return found

    def settle(self) -> None:
        """Waits until all servers have had a version that is newer than the last fault, and memory
        and descriptors are level: both may need time, and a leak would go on."""
        step, end = self.step(), time.monotonic() + _PATIENCE
        behind = set(range(HOSTS))
        while behind or self.usage.judge()[1]:
            if time.monotonic() > end:
                self.wrong += [f"host {i} has no version after {step}" for i in sorted(behind)]
                return
            self.watch(5.0)
            found = enumerate(self.compare())
            behind -= {i for i, seen in found if seen is not None and seen.version > step}

    def others_healthy(self, chosen: Host) -> bool:
        """Tells whether a server other than a host's is ready: without one the run would end."""
        return any(one.healthy() for one in self.hosts if one is not chosen)


def _kill_learner(soak: Soak, chance: random.Random) -> None:
    soak.learner.kill()


def _suspend_learner(soak: Soak, chance: random.Random) -> None:
    learner = soak.learner
    learner.send_signal(signal.SIGSTOP)
    try:
        time.sleep(LEASE * chance.uniform(1.2, 2.0))
    finally:
        learner.send_signal(signal.SIGCONT)


def _kill_server(soak: Soak, chance: random.Random) -> None:
    chosen = chance.choice(soak.hosts)
    if soak.others_healthy(chosen):
        chosen.kill_server()


def _kill_agent(soak: Soak, chance: random.Random) -> None:
    for process in chance.choice(soak.hosts).agent():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _damage_objects(soak: Soak, chance: random.Random) -> None:
    for name, content in _some(soak, chance):
        place = chance.randrange(max(1, len(content)))
        soak.store.objects[name] = (
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        )


def _delete_objects(soak: Soak, chance: random.Random) -> None:
    for name, _ in _some(soak, chance):
        soak.store.objects.pop(name, None)


def _some(soak: Soak, chance: random.Random) -> list[tuple[str, bytes]]:
    there = [item for item in sorted(soak.store.objects.copy().items()) if item[1]]
    return chance.sample(there, min(len(there), chance.randint(1, 3)))


def _swallow(soak: Soak, chance: random.Random) -> None:
    chosen = chance.choice(soak.hosts)
    link = chance.choice([soak.link, chosen.links["store"], chosen.links["server"]])
    if soak.others_healthy(chosen):
        link.flows.clear()
        threading.Timer(chance.uniform(5, 60), link.flows.set).start()


def _store_down(soak: Soak, chance: random.Random) -> None:
    soak.store.down_until = time.monotonic() + chance.uniform(5, 60)


def _disk_full(soak: Soak, chance: random.Random) -> None:
    soak.store.full_until = time.monotonic() + chance.uniform(5, 60)


KILLS: dict[str, Callable[[Soak, random.Random], None]] = {
    "learner killed": _kill_learner,
    "server killed": _kill_server,
    "agent killed": _kill_agent,
}
OTHERS: dict[str, Callable[[Soak, random.Random], None]] = {
    "learner suspended past its lease": _suspend_learner,
    "objects damaged": _damage_objects,
    "objects deleted": _delete_objects,
    "link swallows packets": _swallow,
    "store down": _store_down,
    "store's disk full": _disk_full,
}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("directory", type=Path)
    made.add_argument("--minutes", type=float, default=120.0)
    made.add_argument("--between", type=float, nargs=2, default=(5.0, 30.0), metavar="SECONDS")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    exit_on_sigterm()
    shutil.rmtree(options.directory, ignore_errors=True)
    (options.directory / "logs").mkdir(parents=True)
    with ExitStack() as stack:
        soak = Soak(options, stack)
        _disturb(soak)
        soak.watch(QUIET)
        soak.settle()
        return _report(soak)


def _disturb(soak: Soak) -> None:
    """Draws faults until the time is over."""
    options, chance = soak.options, random.Random(soak.options.seed)
    end = time.monotonic() + 60 * options.minutes
    while (now := time.monotonic()) < end:
        soak.watch(chance.uniform(*options.between))
        faults = OTHERS if now > end - judge.LONG else KILLS | OTHERS
        name = chance.choice(list(faults))
        soak.faults[name] += 1
        print(f"{time.strftime('%X')} step {soak.step()}: {name}", flush=True)
        faults[name](soak, random.Random(chance.random()))


def _report(soak: Soak) -> int:
    """Ends the run, prints what happened and what is wrong, and returns the status."""
    wrong = soak.wrong
    soak.learner.terminate()
    if (status := soak.learner.wait(_PATIENCE)) != 128 + signal.SIGTERM:
        wrong.append(f"the run ended with status {status} after SIGTERM")
    wrong += judge.steps(soak.run_dir, staleness=STALENESS)
    wrong += _final(soak)
    table, grown = soak.usage.judge()
    wrong += grown
    last = judge.outcome(soak.run_dir)[-1]
    print(table)
    print(markdown([{"fault": name, "times": str(n)} for name, n in soak.faults.items()]))
    print(markdown([{"learner ended": name, "times": str(n)} for name, n in soak.ends.items()]))
    groups = {part: int(last[f"rollouts/{part}"]) for part in ("sampled", "trained", "stale")}
    print(f"{last['step']} steps, groups: {groups}; {len(soak.versions)} versions compared")
    print("\n".join(wrong) or "nothing is wrong")
    return int(bool(wrong))


def _final(soak: Soak) -> list[str]:
    """Compares the servers with one that starts with the exported weights."""
    found, end = soak.compare(), time.monotonic() + _PATIENCE
    while None in found and time.monotonic() < end:
        time.sleep(5.0)
        found = soak.compare()
    labels = {seen.label if seen else "none" for seen in found}
    if len(labels) > 1 or "none" in labels:
        return [f"in the end the servers have {[seen and seen.label for seen in found]}"]
    (label,) = labels
    exported, number = soak.options.directory / "exported", label.partition("@")[0]
    command = [*COMMAND, "export", str(soak.run_dir), str(exported), "--step", number]
    subprocess.run(command, check=True, stdout=soak.output)
    with host(exported, store=None, log=soak.options.directory / "logs" / "exported.log") as one:
        wait_for([one], log=soak.options.directory / "logs" / "exported.log")
        expected = one.weights()
    same = [seen is not None and seen.weights == expected for seen in found]
    return [] if all(same) else [f"version {label}: exact are {same}"]


if __name__ == "__main__":
    sys.exit(main())
