"""A clock, faults and a store that are simulated."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from obstore.exceptions import GenericError, NotFoundError


class KilledError(BaseException):
    """A process is killed; nothing in it runs any more."""


class Fault(NamedTuple):
    """Strikes once, at a site's occurrence `nth` from now on."""

    site: str  # path of a request, or a name of `World.strike`
    nth: int
    kind: str


class World:
    """What all processes share.

    Attributes:
      now: seconds of all processes' monotonic clocks.
      wall: seconds that the hosts' clocks are ahead of `now`; may step.
      faults: the faults to come.
      down_until: the time until which the store answers nothing.
      objects: contents of the store by address.
      published: the weights of each version, by session and number.
      settle: lets timers of servers run that are due.
    """

    def __init__(self) -> None:
        self.now, self.wall = 1000.0, 1e9
        self.faults: list[Fault] = []
        self.seen = Counter[str]()
        self.struck = Counter[str]()
        self.down_until = 0.0
        self.objects: dict[str, bytes] = {}
        self.published: dict[tuple[str, int], dict[str, bytes]] = {}
        self.settle: Callable[[], None] = lambda: None
        self.actor = "learner"  # or "agent": makes the store's requests
        self.events = 0

    def plan(self, faults: list[Fault]) -> None:
        """Replaces the faults to come."""
        self.faults, self.seen = list(faults), Counter()

    def strike(self, site: str) -> str:
        """Counts an occurrence of a site; returns the kind of the fault that strikes it, or ""."""
        self.events += 1
        nth = self.seen[site]
        self.seen[site] += 1
        for fault in self.faults:
            if (fault.site, fault.nth) == (site, nth):
                self.faults.remove(fault)
                self.struck[f"{site} {fault.kind}"] += 1
                return fault.kind
        return ""

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds
        self.settle()

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Sets the faults aside for the block."""
        before = self.faults, self.seen
        self.plan([])
        try:
            yield
        finally:
            self.faults, self.seen = before

    @contextlib.contextmanager
    def acting(self, actor: str) -> Iterator[None]:
        """Has another process make the requests of the block."""
        before, self.actor = self.actor, actor
        try:
            yield
        finally:
            self.actor = before


class Bucket:
    """The part of obstore's interface that `Objects` uses, below an address."""

    def __init__(self, world: World, url: str, *, patience: float) -> None:
        """Repeats a request for some seconds."""
        self._world, self._prefix, self._patience = world, f"{url.rstrip('/')}/", patience

    def put(self, name: str, data: Any, *, use_multipart: bool) -> None:
        """Writes an object, or loses or damages it."""
        del use_multipart
        kind, content = self._request("put"), bytes(data)
        if kind == "damage":
            content = damaged(content)
        if kind != "lose":
            self._world.objects[self._prefix + name] = content
        if kind == "kill after":
            raise KilledError(self._world.actor)

    def get(self, name: str) -> Any:
        """Reads an object, or damages it on its way."""
        kind = self._request("get")
        content = self._world.objects.get(self._prefix + name)
        if content is None or kind == "lose":
            raise NotFoundError(f"{name}: 404")
        content = damaged(content) if kind == "damage" else content
        return SimpleNamespace(stream=lambda _: [content])

    def delete(self, names: str | list[str]) -> None:
        """Deletes objects."""
        kind, names = self._request("delete"), [names] if isinstance(names, str) else names
        for name in names if kind != "lose" else ():
            self._world.objects.pop(self._prefix + name, None)

    def list(self) -> Any:
        """Yields one page of all names."""
        self._request("list")
        found = [name for name in self._world.objects if name.startswith(self._prefix)]
        yield [{"path": name.removeprefix(self._prefix)} for name in found]

    def _request(self, site: str) -> str:
        """Counts a request; raises obstore's error."""
        world = self._world
        kind = world.strike(site)
        if kind == "kill":
            raise KilledError(world.actor)
        if (left := world.down_until - world.now) > 0:
            world.sleep(min(left, self._patience))
        if kind == "fail" or world.down_until > world.now:
            raise GenericError("the store does not answer")
        return kind


def damaged(content: bytes) -> bytes:
    """Flips a bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
