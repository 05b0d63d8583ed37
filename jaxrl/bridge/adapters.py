"""Publishing low-rank adapters by themselves, through vLLM's own interface for them.

Every version is a directory in PEFT's format and an adapter with a name of its own: vLLM keys its
cache of prompts by name and path, and requests in flight go on with the adapter that they began
with. What the adapters belong to reaches a server once, through a `WeightPublisher`.
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxrl.bridge.base import (
    InFlight,
    LostError,
    PoisonedError,
    RefusedError,
    Server,
    Timings,
    WeightSource,
)
from jaxrl.bridge.source import ParamsSource
from jaxrl.bridge.swap import switch
from jaxrl.core.precision import DType
from jaxrl.models import peft
from jaxrl.models.lora import Adapted


class AdapterServer(Server, Protocol):
    """The control side of a server that takes adapters."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    def holds(self, label: str) -> bool:
        """Whether the server samples from the weights that were published as `label`.

        Raises:
          LostError: it does not answer.
        """
        ...

    def load_adapter(self, name: str, directory: Path) -> None:
        """Makes the adapter known.

        Raises:
          RefusedError: the server goes on without it.
          LostError: it does not answer.
        """
        ...

    def forget_adapter(self, name: str) -> None:
        """Lets no new request name the adapter; nothing if none could, or if nobody answers."""
        ...


PublishBase = Callable[[Sequence[AdapterServer], WeightSource, int], None]
"""Brings whole weights to some servers as a version; otherwise as `WeightPublisher.publish`."""


class _Loading(NamedTuple):
    """A `Server` whose payloads are adapters."""

    server: AdapterServer
    root: Path

    def connect(self, *, root: str, wire: str, sampler: str) -> None:
        del root, wire, sampler

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        del version, in_flight
        start = time.perf_counter()
        self.server.load_adapter(payload, self.root / payload)
        return Timings(load=time.perf_counter() - start)


class AdapterPublisher:
    """Brings adapters to every server that answers."""

    def __init__(
        self,
        servers: Sequence[AdapterServer],
        root: Path,
        *,
        specs: Adapted,
        base: str,
        wire: DType,
        publish_base: PublishBase,
        keep: int = 2,
    ) -> None:
        """Does not connect yet.

        Args:
          servers: they must see `root` under the same path.
          root: an existing directory, below which each version gets one.
          specs: of the adapters and of what they belong to.
          base: path of the model that they belong to, for the files.
          wire: dtype of adapters and weights on their way.
          publish_base: see `PublishBase`; called for servers that do not hold the weights yet, as
            after a restart, with the version of the adapters that come next.
          keep: versions that stay, because requests may still name them.
        """
        self._servers, self._root = servers, root.resolve()
        self._specs, self._base, self._wire = specs, base, wire
        self._publish_base, self._keep = publish_base, keep
        self._run = secrets.token_hex(4)  # a server may have adapters of an earlier learner
        self._labels: dict[str, str] = {}
        self._names: list[str] = []

    def publish(self, params: Adapted, *, version: int) -> tuple[str, Timings]:
        """Returns once every server that answers knows the adapter of `version`: the name that
        requests give as their model, and seconds.

        Raises:
          RefusedError: every server refused. All go on serving the adapters that they have.
          LostError: no server answers.
          PoisonedError: as `publish_base`.
        """
        start = time.perf_counter()
        name = f"jaxrl-{self._run}-{version}"
        draft, directory = self._root / f".{name}", self._root / name
        peft.save(draft, params.adapters, specs=self._specs, base=self._base, dtype=self._wire)
        draft.rename(directory)
        written = time.perf_counter() - start
        present = self._with_base(params, version)
        try:
            timings = switch(
                [_Loading(server, self._root) for server in present],
                name,
                version=version,
                in_flight="keep",
            )
        except RefusedError:
            self._forget(name)
            raise
        self._names.append(name)
        while len(self._names) > self._keep:
            self._forget(self._names.pop(0))
        return name, timings._replace(write=written)

    def _with_base(self, params: Adapted, version: int) -> list[AdapterServer]:
        """The servers that hold what the adapters belong to, at least one; raises as `publish`."""
        ready: list[AdapterServer] = []
        without: list[AdapterServer] = []
        failures: list[Exception] = []
        for server in self._servers:
            label = self._labels.get(server.url)
            try:
                (ready if label is not None and server.holds(label) else without).append(server)
            except LostError as error:
                failures.append(error)
        if without:
            try:
                ready += self._bring_base(without, params, version)
            except (RefusedError, PoisonedError, LostError) as error:
                failures.append(error)
        if not ready:
            raise failures[0]
        return ready

    def _bring_base(
        self, servers: Sequence[AdapterServer], params: Adapted, version: int
    ) -> list[AdapterServer]:
        """Those of the servers that have taken what the adapters belong to, at least one."""
        source = ParamsSource(params.frozen, self._specs.frozen, dtype=self._wire)
        self._publish_base(servers, source, version)
        for server in servers:
            with contextlib.suppress(LostError):
                if server.holds(str(version)):  # else it was passed over
                    self._labels[server.url] = str(version)
        taken = [server for server in servers if self._labels.get(server.url) == str(version)]
        if not taken:
            raise LostError("no server has what the adapters belong to")
        return taken

    def _forget(self, name: str) -> None:
        for server in self._servers:
            server.forget_adapter(name)
        shutil.rmtree(self._root / name, ignore_errors=True)
