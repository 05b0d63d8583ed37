"""Types that both sides of the bridge share: specs, learners, timings and errors.

Neither this module nor `manifest`, `safetensors_file` and `payload` import jax: vLLM's processes
import them too.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

_MAX_NAME = 1000  # characters of a name

InFlight = Literal["keep", "wait", "abort"]
"""Treatment of requests in flight during a weight sync: `keep` continues them with the new weights
and a recomputed KV cache, `wait` finishes them first, `abort` ends them and the client continues
their completions in new requests."""


class TensorSpec(NamedTuple):
    """Name and full shape of one tensor in Hugging Face's convention, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16" or "float16"


class WeightSource(Protocol):
    """One version of all weights, in the wire dtype."""

    def specs(self) -> Sequence[TensorSpec]:
        """Returns the specs of all tensors in iteration order, without computing them."""
        ...

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and full host array of every tensor. The array must not change
        afterwards: it is copied while the next tensors are fetched."""
        ...


class LearnerIdentity(NamedTuple):
    """Identity of a learner. A server takes weights from only one learner."""

    name: str  # of the run; a resumed run has the same name and may connect again
    session: str  # when the process began, in hexadecimal; an earlier one of the run is refused
    replaces: str = ""  # name of the learner whose servers it takes over


def new_learner(
    name: str | None = None, *, replaces: str = "", begun: int | None = None
) -> LearnerIdentity:
    """Returns a new identity for this process in the run `name`, by default in its own run; raises
    ValueError for a name that `is_name` refuses. `begun` orders the processes of a run: nanoseconds
    since the epoch, by default now."""
    name = f"process {os.getpid()} on {socket.gethostname()}" if name is None else name
    if not is_name(name):
        raise ValueError(
            f"the learner's name {name!r:.300} must be printable and have at most {_MAX_NAME} "
            "characters"
        )
    begun = time.time_ns() if begun is None else begun
    return LearnerIdentity(name, f"{begun:016x}", replaces)


def is_name(value: Any) -> bool:
    """Tells whether a value can be the name of a learner, a tensor or a file."""
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME and value.isprintable()


class Timings(NamedTuple):
    """Seconds spent in each part of a publish; the slowest of several servers counts."""

    write: float = 0.0
    fetch: float = 0.0  # by the agent on a server's host, while the server samples
    pause: float = 0.0
    load: float = 0.0
    resume: float = 0.0


# Prefixes of the engine's error messages; the server's client recognises them.
REFUSED, POISONED = "bridge refused:", "bridge poisoned:"


def marker(text: str) -> str | None:
    """Returns the prefix of the engine's message in a response, None if there is no message."""
    found = [prefix for prefix in (REFUSED, POISONED) if prefix in text]
    return min(found, key=text.index, default=None)  # a message may quote the other prefix


INT8 = "jaxrl_int8"
"""Value of vLLM's `--quantization` for a learner with `blocks=int8`."""

# Prefix of the body of /health while a server has the weights of an unfinished publish.
UNFINISHED = "bridge unfinished:"
# Follows `REFUSED` if no learner has connected since the engine started.
NOT_CONNECTED = "no learner has connected"
# Follows `REFUSED` if the server has ended a publish whose learner was silent for too long.
LAPSED = "this publish lapsed"


def check_head(sampler: str, logits: str) -> None:
    """Raises ValueError if a server that computes in `sampler` would round the head's weights too
    when its head computes in `logits`."""
    if logits not in ("float32", sampler):
        raise ValueError(
            f"logits in {logits} and a sampler in {sampler}: vLLM would also round the head's "
            f"weights to {logits}; use logits=f32, or the sampler's dtype"
        )


class RefusedError(RuntimeError):
    """The server refused the weights before changing any; it still serves its old version."""


class PoisonedError(RuntimeError):
    """A load failed halfway or its outcome is unknown; the server stays paused until a complete
    publish succeeds."""


class UnavailableError(RuntimeError):
    """The server does not answer or fails; other servers may continue without it."""


class BehindError(UnavailableError):
    """The server cannot be given the version yet: its host or the server did not answer the last
    time. Nothing waits for it while another server has the version."""
