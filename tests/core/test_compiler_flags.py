"""Flags of the compiler: by device, never against the user's own, and accepted by real compilers
(tests/commands/plan/test_compilers.py)."""

from types import SimpleNamespace

import jax
import pytest

from jaxrl.core import compiler_flags as own
from jaxrl.core.compiler_flags import compiler_flags, flags_note

V6E = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
MEMORY, PIPELINED = "xla_tpu_scoped_vmem_limit_kib", "xla_tpu_enable_ag_backward_pipelining"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("JAXRL_COMPILER_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(own, "_known", lambda device, flags: dict(flags))


def test_flags_that_this_compiler_does_not_know_are_left_out(monkeypatch):
    monkeypatch.undo()
    flags = {"xla_gpu_no_such": True, "xla_gpu_dot_merger_threshold_mb": 0, "xla_no_such": 1}
    kept = own._known(jax.devices()[0], tuple(flags.items()))
    assert kept == {"xla_gpu_dot_merger_threshold_mb": 0}


def test_flags_depend_on_the_device():
    gpu, cpu = (SimpleNamespace(platform=name, device_kind=name) for name in ("gpu", "cpu"))
    unknown = SimpleNamespace(platform="tpu", device_kind="TPU v99")
    assert compiler_flags(V6E).items() > {**compiler_flags(unknown), MEMORY: 98_304}.items()
    assert compiler_flags(gpu)["xla_gpu_enable_pipelined_all_gather"] is True
    assert compiler_flags(cpu) == {}
    assert flags_note(cpu) is None


def test_the_environment_wins(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{MEMORY}=65536 --{PIPELINED}=false")
    assert not {MEMORY, PIPELINED} & set(compiler_flags(V6E))
    assert MEMORY not in str(flags_note(V6E))
    monkeypatch.setenv("JAXRL_COMPILER_FLAGS", "0")
    assert compiler_flags(V6E) == {}
