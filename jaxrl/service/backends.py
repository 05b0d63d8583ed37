"""The samplers of a service: its own devices, or servers that process 0 talks to."""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxrl.models import Params
from jaxrl.sampling import Completion, EmbeddedSampler, OwnTurn
from jaxrl.service.pool import Base
from jaxrl.sharding import Layout


class Backend(Protocol):
    """A sampler that serves weights with all parameters, and adapters beside the base's.

    Attributes:
      remote: True if it samples elsewhere than on the service's devices. Process 0 alone then has
        it, and `load` takes weights from the host.
    """

    remote: bool

    def load(self, weights: Any) -> None:
        """Serves these weights from now on; no turns are in progress."""
        ...

    def add(self, turns: Sequence[OwnTurn], adapters: Sequence[tuple[str, Params]]) -> int:
        """Adds turns to those in progress; they name adapters by their order, and those in progress
        still name the same ones. Returns the number of the first; the others have the next ones."""
        ...

    def advance(self, most: int) -> list[tuple[int, Completion]]:
        """Draws at most this many tokens for each turn, or waits for servers for a moment unless it
        is 0; returns the numbers and completions of turns that have ended."""
        ...

    def drop(self) -> None:
        """Forgets the turns in progress."""
        ...


class Embedded:
    """The embedded sampler as a `Backend`."""

    remote = False

    def __init__(self, base: Base, *, max_batch: int, layout: Layout | None = None) -> None:
        """Makes the sampler: `max_batch` samples at once, on the devices of `layout`, if there are
        several."""
        settings: dict[str, Any] = {"precision": base.precision, "max_batch": max_batch}
        model = base.model
        if layout is not None:
            model, settings["layout"] = model._replace(local=layout.local), layout
        self.sampler = EmbeddedSampler(model, base.params, **settings)
        self.drop()

    def load(self, weights: Any) -> None:
        """See `Backend.load`."""
        self.sampler.load(weights, version=0)
        self.drop()

    def add(self, turns: Sequence[OwnTurn], adapters: Sequence[tuple[str, Params]]) -> int:
        """See `Backend.add`."""
        return self._batch.add(turns, [one for _, one in adapters])

    def advance(self, most: int) -> list[tuple[int, Completion]]:
        """See `Backend.advance`."""
        return self._batch.advance(most)

    def drop(self) -> None:
        """See `Backend.drop`."""
        self._batch = self.sampler.open_own()


class Elsewhere:
    """The `Backend` of processes other than 0, if process 0 has servers; nothing calls it."""

    remote = True

    def load(self, weights: Any) -> None:
        """Raises RuntimeError."""
        raise _elsewhere()

    def add(self, turns: Sequence[OwnTurn], adapters: Sequence[tuple[str, Params]]) -> int:
        """Raises RuntimeError."""
        raise _elsewhere()

    def advance(self, most: int) -> list[tuple[int, Completion]]:
        """Raises RuntimeError."""
        raise _elsewhere()

    def drop(self) -> None:
        """Does nothing."""


def _elsewhere() -> RuntimeError:
    return RuntimeError("only process 0 samples from the servers")
