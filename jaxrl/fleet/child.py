"""A process of a run on a cluster's node, started and watched by an actor of Ray."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxrl.bridge import free_port
from jaxrl.fleet.engine import import_ray
from jaxrl.fleet.placement import Slot
from jaxrl.fleet.signals import Signals

_PAUSE = 2.0  # seconds in which Ray may notice that a node is dead
_LOOK = 0.2  # seconds between two looks for the end of a process
_REST = 5.0  # seconds for the rest of its output
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# Variables of the command's shell that mean the same on every host. Others belong to a host.
_SHARED = ("JAX", "XLA_", "LIBTPU_", "NCCL_", "HF_", "VLLM_", "WANDB_", "AWS_", "AZURE_", "GOOGLE_")
_ALSO = ("PYTHONPATH", "OMP_NUM_THREADS", "XDG_CONFIG_HOME")
_NOT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # the fleet's own numbers
# Ray sets this one for each actor, to its CPUs.
_OF_RAY = ("OMP_NUM_THREADS",)


class Place(NamedTuple):
    """A node, as an actor on it sees it."""

    node: str  # Ray's id
    ip: str
    order: int  # its number in a TPU slice; 0 elsewhere
    port: int  # one that nobody listens at and no connection is given


def shared_variables() -> dict[str, str]:
    """Returns the variables of this process that its parts on other hosts take over."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_SHARED) or name in _ALSO) and name not in _NOT
    }


def placed(
    slots: Sequence[Slot], *arguments: Any, seconds: float, signals: Signals
) -> list[tuple[Any, Place]] | None:
    """Starts a `Child` of these arguments in each slot; returns the actors with their places, or
    None if that takes too long.

    Ray may still start an actor on a node that has just died, or cancel one that it is about to
    start; such a one is started again.

    Raises:
      InterruptedFleetError: at a signal.
      Exception: as `Child.place`.
    """
    ray, until = import_ray(), time.monotonic() + seconds
    actors, places = [slot.actor(Child).remote(*arguments) for slot in slots], dict[int, Place]()
    answers = [actor.place.remote() for actor in actors]
    try:
        while signals.wait(answers, seconds=until - time.monotonic()):
            for i, answer in enumerate(answers):
                try:
                    places[i] = Place(*ray.get(answer))
                except ray.exceptions.RayActorError:
                    with contextlib.suppress(ray.exceptions.RayError):  # it never began
                        ray.kill(actors[i])
                    signals.sleep(_PAUSE)
                    actors[i] = slots[i].actor(Child).remote(*arguments)
                    answers[i] = actors[i].place.remote()
            if len(places) == len(slots):
                found = [(actor, places[i]) for i, actor in enumerate(actors)]
                actors = []
                return found
        return None
    finally:
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)


class Child:
    """An actor with one process of this environment's Python. The process ends with the actor."""

    def __init__(self, directory: str, variables: Mapping[str, str]) -> None:
        """`directory` is where the process runs, `variables` are added to the actor's own."""
        self._directory, self._variables = directory, dict(variables)
        self._process: asyncio.subprocess.Process | None = None
        self._begun, self._spoken = asyncio.Event(), asyncio.Event()

    async def place(self) -> Place:
        """Returns the node; raises FileNotFoundError if it lacks the working directory."""
        import ray

        if not Path(self._directory).is_dir():
            raise FileNotFoundError(
                f"{self._directory} does not exist on {socket.gethostname()}; all nodes need the "
                "working directory, the inputs and run_dir on shared storage"
            )
        context = ray.get_runtime_context()
        order = str(context.get_node_labels().get("ray.io/tpu-worker-id", "0"))
        port, ip = free_port("", 0), ray.util.get_node_ip_address()
        return Place(context.get_node_id(), ip, int(order), port)

    async def run(self, arguments: Sequence[str], log: str) -> int:
        """Runs `python -m jaxrl ARGUMENTS` to its end; returns its status, -N after signal N. What
        it writes is appended to LOG.log (standard error) and LOG.out (standard output). Processes
        that it leaves behind in its session are killed."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(f"{log}.log", "ab") as file, open(f"{log}.out", "ab", buffering=0) as out:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "jaxrl", *arguments),
                cwd=self._directory,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                preexec_fn=_ending_with_parent(),
            )
            self._begun.set()
            copying = asyncio.create_task(self._copy(self._process, out))
            while self._process.returncode is None:
                await asyncio.sleep(_LOOK)
                if copying.done():
                    copying.result()  # raises what has ended it
            # What it leaves behind may hold its output open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.wait([copying], timeout=_REST)
            copying.cancel()
            return self._process.returncode

    async def _copy(self, process: asyncio.subprocess.Process, out: BinaryIO) -> None:
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            out.write(chunk)
            self._spoken.set()

    async def spoken(self) -> None:
        """Waits until the process writes to standard output."""
        await self._spoken.wait()

    async def send(self, signum: int) -> None:
        """Sends the process a signal once it has begun; does nothing once it has ended."""
        await self._begun.wait()
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    async def read(self, url: str) -> str:
        """Returns what a server on this node answers; raises OSError if it does not."""
        return await asyncio.to_thread(_read, url)

    def _environment(self) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if k not in _OF_RAY}
        return own | self._variables


def _read(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as one:
        return one.read().decode()


def _ending_with_parent() -> Callable[[], None]:
    """Returns a function for the new process, after which it is killed when its parent ends."""
    library = ctypes.CDLL(None)

    def ask() -> None:
        library.prctl(_END_WITH_PARENT, signal.SIGKILL)

    return ask
