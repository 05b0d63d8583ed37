"""The vLLM servers of a fleet: started by actors, watched, and started again."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.bridge import available
from jaxrl.config.training import Config
from jaxrl.core import short_name
from jaxrl.fleet.child import Child, Place
from jaxrl.fleet.engine import import_ray
from jaxrl.fleet.events import Events
from jaxrl.fleet.placement import Slot
from jaxrl.fleet.signals import Signals
from jaxrl.huggingface import Checkpoint

_LONGEST = 64.0  # seconds between two starts
_HEALTHY = 120.0  # seconds of life after which a death counts as the first
_NOTICED = 60.0  # seconds within which a learner that has lost all servers ends


@dataclasses.dataclass
class _Server:
    slot: Slot
    index: int
    actor: Any = None
    place: Place | None = None  # of its first start, which its address names
    answer: Any = None  # of the call that is running: for the place, then for the process's end
    running: bool = False
    spoken: Any = None  # of the call that ends when it is ready
    ready: bool = False
    begun: float = 0.0
    due: float | None = None  # when it is started again
    failures: int = 0

    @property
    def part(self) -> str:
        return f"server {self.index}"


class Servers:
    """Servers in their slots. Each keeps its address for as long as it stays on its node."""

    def __init__(
        self, config: Config, slots: Sequence[Slot], *, directory: Path, events: Events
    ) -> None:
        """`directory` is where the run's paths start."""
        self._config, self._directory, self._events = config, directory, events
        self._servers = [_Server(slot, i) for i, slot in enumerate(slots)]
        self._variables: dict[str, str] = {}
        self._remote = False  # some are on another node than the learner
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
        self._variables = dict(variables)
        missing = [s for s in self._servers if s.place is None or s.answer is None]
        self._place(missing, signals)
        places = [s.place for s in self._servers if s.place is not None]
        remote = any(place.node != learner.node for place in places)
        if remote and not available():
            raise ModuleNotFoundError(
                "the fleet's servers are on other nodes than the learner's process 0, so weights "
                "go through a store, which needs jaxrl[store]: pip install 'jaxrl[store]'"
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
        return [*self._route(places), "--sampler.url", self._urls()]

    def answers(self) -> list[Any]:
        """The calls whose ends `look` wants to know."""
        found = [s.answer for s in self._servers]
        found += [s.spoken for s in self._servers if not s.ready]
        return [one for one in found if one is not None]

    def lost(self) -> bool:
        """Tells if no server is ready, or none was a short time ago."""
        late = time.monotonic() - self._back > _NOTICED
        return bool(self._servers) and not (late and any(s.ready for s in self._servers))

    def look(self, ready: Sequence[Any]) -> None:
        """Takes note of calls that have ended, and starts dead servers again when they are due."""
        for server in self._servers:
            if server.spoken is not None and server.spoken in ready and not server.ready:
                self._greet(server)
            if server.answer is not None and server.answer in ready:
                self._advance(server)
            if server.due is not None and time.monotonic() >= server.due:
                server.due = None
                self._create(server)

    def close(self, servers: Sequence[_Server] | None = None) -> None:
        """Ends servers, by default all."""
        for server in self._servers if servers is None else servers:
            if server.actor is not None:
                import_ray().kill(server.actor)
            server.actor, server.answer, server.due = None, None, None
            server.place, server.running = None, False
            server.spoken, server.ready = None, False

    def _create(self, server: _Server) -> None:
        made = server.slot.actor(Child)
        server.actor = made.remote(str(self._directory), self._variables)
        server.answer, server.running = server.actor.place.remote(), False

    def _place(self, servers: Sequence[_Server], signals: Signals) -> None:
        for server in servers:
            server.place, server.due = None, None
            self._create(server)
        answers = [server.answer for server in servers]
        if answers and not signals.wait(answers, seconds=self._config.fleet.wait):
            raise RuntimeError(
                f"the servers of fleet.servers = {len(self._servers)} could not be started within "
                f"fleet.wait = {self._config.fleet.wait:g} s; see `ray status`"
            )
        for server in servers:
            server.place = Place(*import_ray().get(server.answer))

    def _run(self, server: _Server) -> None:
        assert server.place is not None
        log = self._directory / self._config.run_dir / "logs" / f"server-{server.index}"
        arguments = self._arguments(server.place, log=f"{log}.vllm.log")
        server.answer = server.actor.run.remote(arguments, str(log))
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

    def _greet(self, server: _Server) -> None:
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

    def _advance(self, server: _Server) -> None:
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
        self._run(server)

    def _rest(self, server: _Server, how: str) -> None:
        server.failures = 0 if time.monotonic() - server.begun > _HEALTHY else server.failures
        pause = min(2.0**server.failures, _LONGEST)
        server.failures += 1
        server.due, server.answer, server.running = time.monotonic() + pause, None, False
        server.spoken, server.ready = None, False
        import_ray().kill(server.actor)
        self._events.write(server.part, "died", text=how)
        self._events.note(
            f"{server.part} at {self._url(server)} died ({how}); starting it again in "
            f"{pause:.0f} s, it gets the present weights at a publish"
        )

    def _url(self, server: _Server) -> str:
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
        store = (self._directory / self._config.run_dir / "store").resolve().as_uri()
        self._events.note(f"servers on other nodes: weights go through the store {store}")
        return ["--sampler.store", store]

    def _arguments(self, place: Place, *, log: str) -> list[str]:
        """Returns the arguments of `jaxrl`: a server as the run would start it."""
        c, sampler = self._config, self._config.sampler
        limit = Checkpoint(Path(self._directory, c.model.path)).config.max_positions
        keys = {
            "host": place.ip if self._remote else "127.0.0.1",
            "port": place.port,
            "dtype": short_name(c.precision.sampler),
            "logits": short_name(c.precision.logits),
            "python": sampler.python,
            "device": sampler.device,
            "log": log,
            "max_model_len": min(c.longest_sequence + 1, limit),
        }
        if sampler.kv_cache_bytes is not None:
            keys["kv_cache_bytes"] = sampler.kv_cache_bytes
        if c.lora.publish == "adapters":
            keys["max_lora_rank"] = c.lora.rank
        given = [f"--{name}={value}" for name, value in keys.items()]
        args = ["--vllm_args", json.dumps(sampler.vllm_args)] if sampler.vllm_args else []
        return ["serve", str(Path(self._directory, c.model.path)), *given, *args]
