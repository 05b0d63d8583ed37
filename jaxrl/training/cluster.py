"""Joins the processes of a run, and ends them together."""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax

from jaxrl.config.hosts import HostsConfig, is_address
from jaxrl.config.toml_file import toml_text
from jaxrl.core import Hosts, ReportedError, keep_collectives_ordered, report

JOIN = 300  # seconds to wait for the other processes at the start
HEARTBEAT = 30  # seconds without a heartbeat: longer than any pause of a healthy process

# Ends of keys that name a place: another one on another host, but not one on some hosts alone.
_PLACES = ("path", "_dir")


@contextmanager
def joined(
    config: HostsConfig, *, same: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Joins the other processes of the run for the block; a no-op without a coordinator.

    `same` are the keys that all processes must have been started with, see `check_same`.

    A process that fails or is interrupted prints its number and exits without the shutdown barrier,
    at which the others might wait forever. They exit when they notice: at once in a collective,
    otherwise after HEARTBEAT seconds.

    Raises:
      ValueError: if jax finds no cluster, the keys of [hosts] are wrong or incomplete, or other
        keys differ.
    """
    processes = _known(config.processes, "JAX_NUM_PROCESSES")
    process = _known(config.process, "JAX_PROCESS_ID")
    address = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        _check_alone(processes, process)
        yield
        return
    if config.coordinator != "auto" and not is_address(address):
        raise ValueError(
            f"hosts.coordinator (or JAX_COORDINATOR_ADDRESS) = {address!r}: expected HOST:PORT of "
            "process 0, such as host0:9911, or hosts.coordinator = 'auto'"
        )
    who = "this process" if process is None else f"process {process} of {processes}"
    try:
        with _waiting(who, address, at_most=JOIN):
            jax.distributed.initialize(
                None if address == "auto" else address,
                num_processes=processes,
                process_id=process,
                local_device_ids=_all_devices(os.environ),
                initialization_timeout=2 * JOIN,  # jax's own timeout crashes
                heartbeat_timeout_seconds=HEARTBEAT,
            )
    except ValueError as error:
        raise ValueError(
            f"hosts.coordinator = {address!r}, hosts.processes = {config.processes}, hosts.process "
            f"= {config.process}: {error} Give all three, or 'auto' where jax detects the cluster"
        ) from error
    keep_collectives_ordered()
    try:
        check_same(same)
        yield
    except ReportedError:
        os._exit(1)
    except KeyboardInterrupt:
        _say(f"process {jax.process_index()} of {jax.process_count()} failed: interrupted")
        os._exit(130)
    except Exception as error:
        report(error)
        os._exit(1)
    jax.distributed.shutdown()


def check_same(keys: Mapping[str, Any]) -> None:
    """Checks that all processes were started with the same values of these keys; all must call it.
    Those of [hosts] may differ, and so may places of files, if all processes have one.

    Raises:
      ValueError: on every process, if they were not. It names the first process that differs from
        process 0, and the keys with both values.
    """
    ours = {key: value for key, value in keys.items() if not key.startswith("hosts.")}
    first, *others = Hosts().gather(ours)
    for process, theirs in enumerate(others, start=1):
        if different := [
            f"{key} = {toml_text(first.get(key))} and {toml_text(theirs.get(key))}"
            for key in sorted(first.keys() | theirs.keys())
            if _compared(key, first.get(key)) != _compared(key, theirs.get(key))
        ]:
            raise ValueError(
                f"processes 0 and {process} differ in {'; '.join(different)}; start the same "
                "command with the same config on every host"
            )


def _compared(key: str, value: Any) -> Any:
    return bool(value) if key.endswith(_PLACES) else value


def _check_alone(processes: int | None, process: int | None) -> None:
    if processes != 1 and (processes, process) != (None, None):
        raise ValueError(
            f"hosts.processes = {processes} and hosts.process = {process} (or JAX_NUM_PROCESSES "
            "and JAX_PROCESS_ID) without hosts.coordinator would start separate runs; give the "
            "HOST:PORT of process 0 or 'auto', or leave them out"
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        _say(
            f"this is one of {tasks} Slurm tasks and trains alone; for one run of all tasks give "
            "--hosts.coordinator auto"
        )


@contextmanager
def _waiting(who: str, address: str, *, at_most: int) -> Iterator[None]:
    """Exits the process after `at_most` seconds in the block, where jax cannot be interrupted."""

    def end() -> None:
        _say(
            f"{who} failed: not all processes joined at {address} within {at_most} s. See their "
            "output; check that all have this address and can reach it"
        )
        os._exit(1)

    _say(f"{who} is waiting for the others at {address}, at most {at_most} s")
    timer = threading.Timer(at_most, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    print(f"jaxrl: {text}", file=sys.stderr, flush=True)


def _known(value: int | None, variable: str) -> int | None:
    given = os.environ.get(variable)
    if value is not None or not given:
        return value
    try:
        return int(given)
    except ValueError:
        raise ValueError(f"{variable} = {given!r}: expected a number") from None


def _all_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns [], meaning all devices, if Slurm or Open MPI started one process on this node: jax
    would take only the GPU with the process's number on the node. None leaves the choice to jax and
    its JAX_LOCAL_DEVICE_IDS."""
    # Every node of a step has a task, so equal numbers mean one task per node.
    tasks, nodes = environment.get("SLURM_NTASKS"), environment.get("SLURM_STEP_NUM_NODES")
    alone = tasks is not None and tasks == nodes
    alone = alone or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    return [] if alone and not environment.get("JAX_LOCAL_DEVICE_IDS") else None
