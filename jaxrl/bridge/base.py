"""What a bridge is made of: a source of weights, servers that hold them, a publisher between.

Nothing here or in `manifest`, `layout` and `payload` imports jax: vLLM's processes import them too.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

InFlight = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight when the weights change: `keep` goes on with the new weights
and a recomputed cache, `wait` lets them end first, `abort` ends them where they are, and the client
continues them with new ones."""


class TensorSpec(NamedTuple):
    """One tensor as Hugging Face names and shapes it.

    Attributes:
      name: Hugging Face's name.
      shape: full, in Hugging Face's orientation.
      dtype: "float32", "bfloat16" or "float16".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightSource(Protocol):
    """One version of all weights, in the wire dtype."""

    def specs(self) -> Sequence[TensorSpec]:
        """What iteration yields, in that order, without computing it."""
        ...

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and full host array of every tensor; an array is valid until the next is taken."""
        ...


class Timings(NamedTuple):
    """Seconds that the parts of a publish took; where there are several servers, of the slowest."""

    write: float = 0.0
    pause: float = 0.0
    load: float = 0.0
    resume: float = 0.0


# How the engine's error messages begin, so that both ends of an HTTP connection tell them apart.
REFUSED, POISONED = "bridge refused:", "bridge poisoned:"
# What the engine says, after `REFUSED`, of a learner that it has not met since its start.
STRANGER = "no learner has connected"


class RefusedError(RuntimeError):
    """The server refused the weights before it touched any; it still serves its old version."""


class PoisonedError(RuntimeError):
    """A load failed halfway, or nobody knows how it ended: the server stays paused until a complete
    publish succeeds."""


class LostError(RuntimeError):
    """The server does not answer, or is ill; other servers may go on without it."""


class Server(Protocol):
    """The control side of one sampling server."""

    def connect(self, *, root: str, wire: str, sampler: str) -> None:
        """Tells the server where payloads will lie and in which dtype; one that does not answer is
        told at the next update.

        Raises:
          RefusedError: if the server computes in another dtype than `sampler`, or has no such root.
        """
        ...

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        """Pauses, loads `payload`, a directory below the root, names the version and resumes.

        Raises:
          RefusedError: the old weights keep serving.
          PoisonedError: the server stays paused.
          LostError: it does not answer.
        """
        ...


class WeightPublisher(Protocol):
    """Brings weights to every server."""

    def publish(self, source: WeightSource, *, version: int) -> Timings:
        """Returns once every server that is well serves `version`, at least one.

        Raises:
          RefusedError: every server refused and serves its old version.
          PoisonedError: none serves `version`, and one stays paused; publish again.
          LostError: no server answers.
        """
        ...
