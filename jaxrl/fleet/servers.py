"""The vLLM servers of a fleet: started by actors, watched, started again, added and removed."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.bridge import available
from jaxrl.config.fleet import read_resources
from jaxrl.config.training import Config
from jaxrl.fleet.addresses import Addresses, write_addresses
from jaxrl.fleet.child import Child, Place, placed
from jaxrl.fleet.engine import free, import_ray
from jaxrl.fleet.events import Events
from jaxrl.fleet.placement import Slot
from jaxrl.fleet.server import Server, arguments, open_requests
from jaxrl.fleet.signals import Signals
from jaxrl.fleet.wanted import Wanted

_LONGEST = 64.0  # seconds between two starts
_HEALTHY = 120.0  # seconds of life after which a death counts as the first
_NOTICED = 60.0  # seconds within which a learner that has lost all servers ends
_ANSWER = 10.0  # seconds for a server's answer
_IDLE = 5.0  # seconds without a request after which a server that leaves is ended


class Servers:
    """Servers in their slots. Each keeps its address for as long as it stays on its node.

    Their number follows what users ask for. The learner knows those of the beginning and, from the
    file of addresses, those that were ready once.
    """

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        *,
        directory: Path,
        wanted: Wanted,
        events: Events,
    ) -> None:
        """`directory` is where the run's paths start."""
        self._config, self._directory, self._events = config, directory, events
        self._servers = [Server(slot, i) for i, slot in enumerate(slots)]
        self._own = [slot.group for slot in slots]
        self._wanted, self._spare = wanted, list[Slot]()  # slots of the run without a server
        self._variables: dict[str, str] = {}
        self._learner = ""  # the node of its process 0
        self._remote = False  # weights go through a store, so they may be on any node
        self._back = -math.inf  # when one was ready again after all had been down

    def open(self, learner: Place, *, variables: Mapping[str, str], signals: Signals) -> list[str]:
        """Starts the servers beside a learner whose process 0 is at a place; returns the options
        that tell it. Servers that are already there stay, unless the way of the weights changes.

        Raises:
          RuntimeError: if a server ends before it is ready, or is not placed in time.
          ModuleNotFoundError: without jaxrl[store], if weights have to reach another node.
        """
        if not self._servers:
            return []
        self._variables, self._learner = dict(variables), learner.node
        for server in list(self._servers):
            if server.leaving or (server.added and not server.ready):
                self._remove(server)  # `look` adds as many as are missing
        missing = [s for s in self._servers if s.place is None or s.answer is None]
        self._place(missing, signals)
        places = [s.place for s in self._servers if s.place is not None]
        given = self._config.sampler.store is not None
        remote = given or any(place.node != learner.node for place in places)
        if remote and not available():
            why = "sampler.store is set" if given else "they are on other nodes than process 0"
            raise ModuleNotFoundError(
                f"weights go to the fleet's servers through a store, because {why}; that needs "
                "jaxrl[store]: pip install 'jaxrl[store]'"
            )
        if remote != self._remote:
            changed = [s for s in self._servers if s.running]
            self.close(changed)
            self._place(changed, signals)
        self._remote = remote
        for server in self._servers:
            if not server.running:
                self._run(server)
        self._await(signals)
        self._back = -math.inf
        self._write()
        return [*self._route(places), "--sampler.url", self._urls()]

    def answers(self) -> list[Any]:
        """The calls whose ends `look` wants to know."""
        found = [s.answer for s in self._servers]
        found += [s.spoken for s in self._servers if not s.ready and not s.leaving]
        return [one for one in found if one is not None]

    def lost(self) -> bool:
        """Tells if no server answers, or none was ready a short time ago. Then `open` starts those
        that do not answer anew."""
        late = time.monotonic() - self._back > _NOTICED
        ready = [server for server in self._staying() if server.ready]
        answering = [server for server in ready if self._answers(server)]
        if not self._servers or (late and answering):
            return False
        self.close([server for server in ready if server not in answering])
        return True

    def look(self, ready: Sequence[Any]) -> None:
        """Takes note of calls that have ended, starts dead servers again when they are due, and
        adds or removes servers until there are as many as are asked for."""
        self._resize()
        for server in list(self._servers):
            if server.leaving:
                self._drain(server, ready)
                continue
            if server.spoken is not None and server.spoken in ready and not server.ready:
                self._greet(server)
            if server.answer is not None and server.answer in ready:
                self._advance(server)
            if server.due is not None and time.monotonic() >= server.due:
                server.due = None
                self._create(server)
            if server.late is not None and time.monotonic() >= server.late:
                self._tell(server)

    def close(self, servers: Sequence[Server] | None = None) -> None:
        """Ends servers, by default all."""
        for server in self._servers if servers is None else servers:
            if server.actor is not None:
                import_ray().kill(server.actor)
            server.actor, server.answer, server.due = None, None, None
            server.place, server.running = None, False
            server.spoken, server.ready, server.asked = None, False, None

    def _answers(self, server: Server) -> bool:
        """Asks a server, because Ray tells of its death later than the learner notices it."""
        ray = import_ray()
        try:
            ray.get(server.actor.read.remote(f"{self._url(server)}/health"), timeout=_ANSWER)
        except ray.exceptions.RayError:
            return False
        return True

    def _staying(self) -> list[Server]:
        return [server for server in self._servers if not server.leaving]

    def _write(self) -> None:
        """Tells the learner which servers there are."""
        known = [s for s in self._servers if s.place and (s.listed or not s.added)]
        present = [self._url(s) for s in known if not s.leaving]
        leaving = [self._url(s) for s in known if s.leaving]
        write_addresses(self._directory / self._config.run_dir, Addresses(present, leaving))

    def _resize(self) -> None:
        staying, wanted = self._staying(), self._wanted.read()
        if not staying or wanted is None or wanted == len(staying):
            return
        self._events.note(f"{wanted} servers asked for, {len(staying)} before")
        self._events.write("fleet", "resized", servers=wanted)
        for server in staying[wanted:]:
            server.leaving = True
            self._events.write(server.part, "leaving")
            if not server.listed and server.added:
                self._remove(server)
        for _ in range(wanted - len(staying)):
            self._add()
        self._write()

    def _add(self) -> None:
        index = 1 + max(server.index for server in self._servers)
        if self._spare:
            server = Server(self._spare.pop(), index)
        else:
            each = read_resources(self._config.fleet.server_resources)
            # Through shared memory weights reach the learner's node alone.
            node = {} if self._remote else {"ray.io/node-id": self._learner}
            group = import_ray().util.placement_group([each], bundle_label_selector=[node])
            server = Server(Slot(group, 0, each), index)
            server.late = time.monotonic() + self._config.fleet.wait
        server.added = True
        self._servers.append(server)
        self._create(server)

    def _tell(self, server: Server) -> None:
        server.late = None
        there = ", ".join(f"{k} {v:g}" for k, v in sorted(free().items())) or "nothing"
        where = "a node" if self._remote else "the learner's node, where its weights are,"
        self._events.note(
            f"{server.part} waits for {', '.join(self._config.fleet.server_resources)}; free are: "
            f"{there}. It starts as soon as {where} has that much"
        )

    def _drain(self, server: Server, ready: Sequence[Any]) -> None:
        """Ends a server that leaves once it has had no requests for some time, or has died."""
        ray, now = import_ray(), time.monotonic()
        if server.answer is None or server.answer in ready:
            self._remove(server)
        elif server.asked is None:
            server.asked = server.actor.read.remote(f"{self._url(server)}/metrics")
        elif ray.wait([server.asked], timeout=0)[0]:
            try:
                busy = open_requests(ray.get(server.asked)) > 0
            except ray.exceptions.RayError:
                busy = False  # it does not answer
            server.asked = None
            server.idle = None if busy else server.idle or now
            if server.idle is not None and now - server.idle >= _IDLE:
                self._remove(server)

    def _remove(self, server: Server) -> None:
        self.close([server])
        self._servers.remove(server)
        self._write()
        if server.slot.group in self._own:
            self._spare.append(server.slot)
        else:
            import_ray().util.remove_placement_group(server.slot.group)
        self._events.write(server.part, "removed")

    def _create(self, server: Server) -> None:
        made = server.slot.actor(Child)
        server.actor = made.remote(str(self._directory), self._variables)
        server.answer, server.running = server.actor.place.remote(), False

    def _place(self, servers: Sequence[Server], signals: Signals) -> None:
        found = placed(
            [server.slot for server in servers],
            str(self._directory),
            self._variables,
            seconds=self._config.fleet.wait,
            signals=signals,
        )
        if found is None:
            raise RuntimeError(
                f"the servers of fleet.servers = {len(self._servers)} could not be started within "
                f"fleet.wait = {self._config.fleet.wait:g} s; see `ray status`"
            )
        for server, (actor, place) in zip(servers, found, strict=True):
            server.actor, server.place, server.due, server.running = actor, place, None, False

    def _run(self, server: Server) -> None:
        assert server.place is not None
        log = self._directory / self._config.run_dir / "logs" / f"server-{server.index}"
        words = arguments(
            self._config,
            server.place,
            directory=self._directory,
            host=server.place.ip if self._remote else "127.0.0.1",
            log=f"{log}.vllm.log",
        )
        server.answer = server.actor.run.remote(words, str(log))
        server.spoken = server.actor.spoken.remote()
        server.running, server.begun = True, time.monotonic()
        self._events.write(server.part, "started", url=self._url(server))

    def _await(self, signals: Signals) -> None:
        """Waits until all servers have printed their addresses."""
        ray = import_ray()
        for server in self._servers:
            while not signals.wait([server.spoken], seconds=1.0):
                if ray.wait([server.answer], timeout=0)[0]:
                    log = self._directory / self._config.run_dir / "logs"
                    raise RuntimeError(
                        f"{server.part} of the fleet ended before it was ready; see "
                        f"{log}/server-{server.index}.log"
                    )
            if not server.ready:
                self._greet(server)

    def _greet(self, server: Server) -> None:
        """Takes note of a server that is ready, or has ended before it was."""
        try:
            import_ray().get(server.spoken)
        except import_ray().exceptions.RayError:
            server.spoken = None
            return
        if not any(one.ready for one in self._servers):
            self._back = time.monotonic()
        server.ready = True
        self._events.write(server.part, "ready", url=self._url(server))
        if not server.listed:
            server.listed = True
            self._write()

    def _advance(self, server: Server) -> None:
        ray = import_ray()
        try:
            found = ray.get(server.answer)
        except ray.exceptions.RayError as error:
            self._rest(server, str(error).splitlines()[0])
            return
        if server.running:
            how = f"killed by signal {-found}" if found < 0 else f"exit status {found}"
            self._rest(server, how)
            return
        place = Place(*found)
        if server.place is not None and place.node != server.place.node:
            self._events.note(
                f"{server.part} cannot come back to {self._url(server)}, because its node is lost; "
                "the learner continues with the others, and with all after its next start"
            )
            ray.kill(server.actor)
            server.actor, server.answer, server.place = None, None, None
            return
        server.place, server.late = server.place or place, None
        self._run(server)

    def _rest(self, server: Server, how: str) -> None:
        server.failures = 0 if time.monotonic() - server.begun > _HEALTHY else server.failures
        pause = min(2.0**server.failures, _LONGEST)
        server.failures += 1
        server.due, server.answer, server.running = time.monotonic() + pause, None, False
        server.spoken, server.ready = None, False
        import_ray().kill(server.actor)
        self._events.write(server.part, "died", text=how)
        where = f" at {self._url(server)}" if server.place else ""
        self._events.note(
            f"{server.part}{where} died ({how}); starting it again in "
            f"{pause:.0f} s, it gets the present weights at a publish"
        )

    def _url(self, server: Server) -> str:
        assert server.place is not None
        host = server.place.ip if self._remote else "127.0.0.1"
        return f"http://{host}:{server.place.port}"

    def _urls(self) -> str:
        return ",".join(self._url(s) for s in self._servers if s.place is not None)

    def _route(self, places: Sequence[Place]) -> list[str]:
        if not self._remote:
            self._events.note(
                f"{len(places)} server{'s' * (len(places) > 1)} on the learner's node: weights go "
                "through shared memory"
            )
            return []
        if (store := self._config.sampler.store) is not None:
            self._events.note(f"weights go through sampler.store = {store!r}")
            return []  # the learner has the key already
        store = (self._directory / self._config.run_dir / "store").resolve().as_uri()
        self._events.note(f"servers on other nodes: weights go through the store {store}")
        return ["--sampler.store", store]
