"""Ray, behind one door: the import, the connection, and what a cluster has."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl.config.fleet import Resources

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
_OBJECTS = 256 << 20  # bytes of the object store of a cluster that is started here


def import_ray() -> ModuleType:
    """Returns the module; raises ModuleNotFoundError, which names the extra, without it."""
    # A cluster that a run starts reports nothing to Ray's authors.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's coming default, whose announcement it would print: an actor that asks for no GPUs keeps
    # those that are visible.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Else the processes of a cluster that a run starts would yield to all others of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fleet.engine = 'ray' needs the package ray: pip install 'jaxrl[ray]'"
        ) from error
    return ray


class Cluster(NamedTuple):
    """A cluster that this process is connected to."""

    address: str
    started: bool  # by this process, on this machine alone


def connect(*, namespace: str, address: str | None = None) -> Cluster:
    """Connects this process to the cluster at `address`, or else to the one at RAY_ADDRESS or on
    this machine; starts one on this machine if there is none, or if RAY_ADDRESS is `local`.

    Raises:
      RuntimeError: if the cluster cannot be reached.
      ModuleNotFoundError: without Ray.
    """
    ray = import_ray()
    started = not running(namespace=namespace, address=address)
    if started:
        with _own_signals():
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                object_store_memory=_OBJECTS,
                **_QUIET,
            )
    return Cluster(str(ray.get_runtime_context().gcs_address), started)


def running(*, namespace: str, address: str | None = None) -> bool:
    """Connects this process to a running cluster, as `connect`; returns False if none runs on this
    machine and no other is named, or if one is to be started. Raises as `connect`."""
    ray = import_ray()
    named = address or os.environ.get("RAY_ADDRESS")
    if named == "local":
        return False
    try:
        with _own_signals():
            ray.init(address=named or "auto", namespace=namespace, **_QUIET)
    except Exception as error:
        if named is None and isinstance(error, ConnectionError):
            return False
        raise RuntimeError(
            f"the Ray cluster at {named or 'this machine'} cannot be reached: {error}; start it "
            "(ray start --head), or unset RAY_ADDRESS: the run then starts one on this machine"
        ) from error
    return True


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's handlers: Ray would end it at SIGTERM without its last checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def nodes() -> list[Resources]:
    """Returns the resources of each living node of the cluster, in all."""
    found = (node for node in import_ray().nodes() if node["Alive"])
    return [_plain(node["Resources"]) for node in found]


def free() -> Resources:
    """Returns what is free in the cluster."""
    return _plain(import_ray().available_resources())


def _plain(found: dict[str, Any]) -> Resources:
    """Drops the names that Ray uses for itself."""
    return {
        name: float(amount)
        for name, amount in found.items()
        if ":" not in name
        and "_group_" not in name
        and name not in ("memory", "object_store_memory")
    }
