"""Runs `jaxrl train` on a cluster: places its parts, watches them, and starts them again."""

import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.bridge import given_key
from jaxrl.config.training import Config
from jaxrl.fleet.child import Place, placed, shared_variables
from jaxrl.fleet.engine import Cluster, connect, import_ray
from jaxrl.fleet.events import Events, followed
from jaxrl.fleet.membership import Membership
from jaxrl.fleet.placement import Slots, UnplacedError, reserved, unplaced
from jaxrl.fleet.pool import Pool
from jaxrl.fleet.request import LEARNER, SERVER, WORKER, requests, text_of
from jaxrl.fleet.servers import Servers
from jaxrl.fleet.signals import InterruptedFleetError, Signals
from jaxrl.fleet.wanted import Wanted

_POLL = 0.5  # seconds between two looks for a signal
_GRACE = 60.0  # seconds in which the hosts of a broken gang end by themselves, as [hosts] promises


def launch(config: Config, argv: Sequence[str]) -> int:
    """Runs `jaxrl train ARGV`, whose config has an engine, on a cluster; returns its exit status.

    Raises:
      ValueError: if the servers' addresses are given although the fleet starts them, or the fleet
        of another command uses the run's directory.
      UnplacedError: if the cluster has not enough; the message names each resource.
      RuntimeError: if a cluster cannot be reached, a server does not start, or learner hosts have
        died more often than `fleet.restarts`.
      ModuleNotFoundError: without Ray.
    """
    if config.fleet.servers and config.sampler.url:
        raise ValueError(
            f"fleet.servers = {config.fleet.servers} and sampler.url = "
            f"{list(config.sampler.url)}: the fleet knows the addresses of the servers that it "
            "starts; leave sampler.url out, or fleet.servers to use running ones"
        )
    directory = Path(config.run_dir).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    status = 1
    with Events(directory, _note) as events:
        try:
            status = _launch(config, argv, events=events)
        finally:
            events.write("fleet", "ended", status=status)
    return status


def _launch(config: Config, argv: Sequence[str], *, events: Events) -> int:
    signals, namespace = Signals(), f"jaxrl-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        cluster = connect(namespace=namespace)
        stack.callback(import_ray().shutdown)
        where = "this machine" if cluster.started else f"the Ray cluster at {cluster.address}"
        stack.enter_context(signals.recorded())
        try:
            asked = text_of(requests(config.fleet))
            if config.fleet.learner_slice is not None:
                asked = f"TPU slice {config.fleet.learner_slice}, {asked}".removesuffix(", ")
            events.note(f"on {where}: {asked}")
            events.begin(asked)
            slots = stack.enter_context(
                reserved(config.fleet, cluster, signals=signals, note=events.note)
            )
            fleet = _Fleet(config, argv, slots=slots, events=events, signals=signals)
            return fleet.run(cluster, namespace)
        except InterruptedFleetError as end:
            events.note(f"ended by signal {end.signum}")
            return 128 + end.signum


def _note(text: str) -> None:
    print(f"fleet: {text}", file=sys.stderr, flush=True)


class _Gang(NamedTuple):
    """The learner hosts of one start: their ends, statuses of processes or the loss of an actor."""

    ends: Mapping[int, int | str]
    stopped: frozenset[int]  # those that were ended because others had

    def died(self) -> str | None:
        """Describes the first host that a signal or the loss of its node ended; None if all ended
        by themselves."""
        for i, end in self.ends.items():
            if i not in self.stopped and (isinstance(end, str) or end < 0):
                how = end if isinstance(end, str) else f"killed by signal {-end}"
                return f"learner host {i} died ({how})"
        return None

    def status(self) -> int:
        """Returns the status of process 0, or of another one if that is 0."""
        found = [self.ends[i] for i in sorted(self.ends) if i not in self.stopped]
        return next((end for end in found if isinstance(end, int) and end), 0)


class _Fleet:
    """The parts of a run in their slots."""

    def __init__(
        self, config: Config, argv: Sequence[str], *, slots: Slots, events: Events, signals: Signals
    ) -> None:
        self._config, self._argv = config, list(argv)
        self._slots, self._events, self._signals = slots, events, signals
        self._directory = Path.cwd()
        self._logs = (self._directory / config.run_dir / "logs").absolute()
        self._workers = Pool(
            config.fleet,
            slots.get(WORKER, ()),
            directory=self._directory,
            wanted=Wanted(self._logs.parent, "workers"),
            events=events,
        )
        self._servers = Servers(
            config,
            slots.get(SERVER, ()),
            directory=self._directory,
            wanted=Wanted(self._logs.parent, "servers"),
            events=events,
        )
        self._variables = shared_variables()
        if config.fleet.servers:  # one key for them and the learner, perhaps on different nodes
            self._variables["JAXRL_API_KEY"] = given_key() or secrets.token_hex(16)

    def run(self, cluster: Cluster, namespace: str) -> int:
        """Runs the learner to its end; returns the exit status."""
        c = self._config.fleet
        member = Membership(cluster.address, namespace, len(self._workers))
        try:
            for start in range(c.restarts + 1):
                gang = self._run_gang(self._variables | member.variables())
                died = gang.died() or self._without_servers(gang)
                if died is None or self._signals.received:
                    return self._status(gang)
                self._workers.restart()
                again = f"restart {start + 1} of {c.restarts}, from the last checkpoint"
                self._events.note(f"{died}; {again}" if start < c.restarts else died)
            raise RuntimeError(
                f"{died}, and the learner ended so or alike at each of {c.restarts + 1} starts "
                f"(fleet.restarts = {c.restarts}); see {self._logs}. The same command resumes it"
            )
        finally:
            self._servers.close()
            self._workers.close()

    def _without_servers(self, gang: _Gang) -> str | None:
        """Describes the end of a learner whose servers had all died; None for another end."""
        if gang.status() == 1 and self._servers.lost():
            return "the learner ended because no server was left"
        return None

    def _status(self, gang: _Gang) -> int:
        status = gang.status()
        if status < 0 or (self._signals.received and not status):
            return 128 + (self._signals.received[0] if self._signals.received else -status)
        return status

    def _run_gang(self, variables: Mapping[str, str]) -> _Gang:
        """Starts the learner on all of its hosts, and waits until all have ended."""
        c = self._config.fleet
        found = placed(
            self._slots[LEARNER],
            str(self._directory),
            variables,
            seconds=c.wait,
            signals=self._signals,
        )
        if found is None:
            raise UnplacedError(unplaced(requests(c), c))
        found.sort(key=lambda one: one[1].order)  # the processes of a TPU slice have numbers
        actors, places = [one[0] for one in found], [one[1] for one in found]
        try:
            route = self._servers.open(places[0], variables=variables, signals=self._signals)
            with (
                followed(self._logs / "learner-0.log", sys.stderr),
                followed(self._logs / "learner-0.out", sys.stdout),
            ):
                return self._watch(actors, places, [*self._argv, *route])
        finally:
            for actor in actors:
                import_ray().kill(actor)

    def _watch(self, actors: Sequence[Any], places: Sequence[Place], argv: list[str]) -> _Gang:
        ray, running, ends = import_ray(), dict[Any, int](), dict[int, int | str]()
        for i, actor in enumerate(actors):
            log = str(self._logs / f"learner-{i}")
            running[actor.run.remote(["train", *argv, *_hosts(places, i)], log)] = i
            self._events.write(f"learner {i}", "started", node=places[i].ip)
        passed_on, until, stopped = 0, math.inf, frozenset[int]()
        while running:
            self._signals.check(allowed=1)
            if len(self._signals.received) > passed_on:
                passed_on = 1
                for actor in actors:
                    actor.send.remote(self._signals.received[0])
            answers = [*running, *self._servers.answers()]
            ready, _ = ray.wait(answers, num_returns=1, timeout=_POLL)
            for answer in ready:
                if answer in running:
                    i = running.pop(answer)
                    ends[i] = self._end(i, answer)
                    if ends[i] != 0 and until == math.inf:
                        until = time.monotonic() + _GRACE
            self._servers.look(ready)
            self._workers.look()
            if time.monotonic() > until and not stopped:
                stopped = frozenset(running.values())
                for i in stopped:
                    ray.kill(actors[i])
        return _Gang(ends, stopped)

    def _end(self, index: int, answer: Any) -> int | str:
        ray = import_ray()
        try:
            end: int | str = ray.get(answer)
        except ray.exceptions.RayActorError:
            end = "its actor or its node is lost"
        if isinstance(end, str) or end < 0:
            self._events.write(f"learner {index}", "died", text=str(end))
        else:
            self._events.write(f"learner {index}", "ended", status=end)
        return end


def _hosts(places: Sequence[Place], index: int) -> list[str]:
    """Returns the options that join a process to the others; none for a single one."""
    if len(places) == 1:
        return []
    return [
        *("--hosts.coordinator", f"{places[0].ip}:{places[0].port}"),
        *("--hosts.processes", str(len(places))),
        *("--hosts.process", str(index)),
    ]
