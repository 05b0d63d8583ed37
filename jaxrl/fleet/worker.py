"""A worker of a fleet: a process that calls functions for the learner, as an actor of Ray."""

import asyncio
import os
import pickle
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax

from jaxrl.environments import use_processors

_THREADS = 4096  # started as calls need them


class Raised(NamedTuple):
    """The result of a call that raised."""

    error: Exception


class Worker:
    """Calls the functions that the learner names, each in a thread of its own."""

    def __init__(self, directory: str, path: Sequence[str], *, processors: int) -> None:
        """Enters the run's working directory and takes the learner's module search path. The
        node's accelerators stay with learner and servers."""
        os.chdir(directory)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        use_processors(processors)
        jax.config.update("jax_platforms", "cpu")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="calls")

    async def awake(self) -> bool:
        """Answers, also during calls, which shows that the process runs."""
        return True

    async def call(self, request: bytes) -> bytes:
        """Makes a pickled call, (function, arguments); returns its pickled result, or `Raised`."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _answer, request)


def _answer(request: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(request)
        return pickle.dumps(function(*arguments))
    except Exception as error:
        return pickle.dumps(Raised(_picklable(error)))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
