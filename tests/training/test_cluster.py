"""What is refused before a process looks for others; test_hosts.py has several."""

import jax
import pytest

from jaxrl.builders.layout import make_layout
from jaxrl.config.hosts import HostsConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.training.cluster import joined


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"processes": 4, "process": 0}, {}),
        ({"processes": 4}, {}),
        ({"process": 0}, {}),
        ({}, {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}),
        ({"processes": 4}, {"JAX_PROCESS_ID": "1"}),
    ],
)
def test_process_number_without_coordinator_is_an_error(monkeypatch, given, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ValueError, match=r"without hosts\.coordinator"),
        joined(HostsConfig(**given)),
    ):
        raise AssertionError("a run of its own")


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES = 'two': expected a number"):
        joined(HostsConfig(coordinator="host0:9911")).__enter__()


@pytest.mark.parametrize("address", ["host0", "host0:", ":9911", "host0:http", "Auto"])
def test_coordinator_without_port_is_an_error(monkeypatch, address):
    with pytest.raises(ValueError, match="expected HOST:PORT of process 0, such"):
        HostsConfig(coordinator=address)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    refused = pytest.raises(ValueError, match=f"{address!r}: expected HOST:PORT of process 0, such")
    with refused, joined(HostsConfig(processes=2, process=1)):
        raise AssertionError("nobody is there")


@pytest.mark.parametrize("given", [{}, {"processes": 1}, {"processes": 1, "process": 0}])
def test_single_process_needs_no_coordinator(given, capsys):
    with joined(HostsConfig(**given)):
        pass
    assert capsys.readouterr().err == ""


def test_slurm_task_without_coordinator_is_warned(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with joined(HostsConfig()):
        pass
    assert "one of 4 Slurm tasks and trains alone" in capsys.readouterr().err


def _join() -> None:
    with joined(HostsConfig(coordinator="host0:9911", processes=2, process=0)):
        pass


def _lay_out() -> None:
    make_layout(MeshConfig(fsdp=2), apart={"critic_mesh": jax.device_count() - 2})


@pytest.mark.parametrize("start", [_join, _lay_out])
@pytest.mark.parametrize(("threads", "kept"), [(None, False), ("64", True)])
def test_several_cpu_devices_compile_every_program_anew(monkeypatch, start, threads, kept):
    """A program from the cache has lost the order of its collectives."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **keys: None)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    if threads is not None:
        monkeypatch.setenv("PJRT_NPROC", threads)
    before = jax.config.jax_enable_compilation_cache
    try:
        start()
        assert jax.config.jax_enable_compilation_cache == kept
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
