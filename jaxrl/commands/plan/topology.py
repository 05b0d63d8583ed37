"""Devices to compile for that need not exist: TPUs, GPUs and simulated CPU devices."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxrl.builders.gpu_memory import jax_share
from jaxrl.commands.plan.chips import CHIPS, GPUS, Chip
from jaxrl.commands.plan.gpu import gpu_devices

_FORM = "expected v5p:4x4x4, v6e:4x4, h100:8 (h100:2x8 for two hosts) or cpu:8, or other sizes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to compile for."""

    name: str  # the requested name, e.g. "v5p:4x4x4"
    chip: Chip  # the kind of chip; its memory is what programs can use
    devices: Sequence[Any]  # `jax.Device`s; described TPUs and GPUs cannot run programs

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program for these devices. It goes past the compile cache if they are only
        described, because without a chip its programs cannot be read back."""
        if self.name.startswith("cpu:"):
            return lowered.compile()
        with _without_cache():
            return lowered.compile()


def open_topology(name: str) -> Topology:
    """Opens a topology by name.

    Call it before anything else uses jax: it makes the CPU the only platform of this process.

    Raises:
      ValueError: for an unknown name, or sizes that libtpu does not support.
      ModuleNotFoundError: if the compiler for these chips is missing.
      RuntimeError: if jax was started with fewer devices.
    """
    kind, _, shape = name.partition(":")
    most = 2 if kind in GPUS else 3
    sizes = (
        [int(n) for n in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    )
    if kind not in (*CHIPS, "cpu") or not 1 <= len(sizes) <= most:
        raise ValueError(f"topology {name!r}: {_FORM}")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if kind == "cpu":
        return _simulated(name, count=math.prod(sizes))
    chip = CHIPS[kind]
    if kind in GPUS:
        *hosts, each = sizes
        devices = gpu_devices(kind, hosts=math.prod(hosts), each=each)
        chip = dataclasses.replace(
            chip,
            memory=chip.memory * jax_share(),
            # The data sheet has no rate between hosts.
            link_rate=None if hosts else chip.link_rate,
        )
    else:
        devices = _tpu_devices(name, kind, sizes)
    return Topology(name=name, chip=chip, devices=devices)


@contextmanager
def _without_cache() -> Iterator[None]:
    enabled = jax.config.values["jax_enable_compilation_cache"]
    _set_cache(False)
    try:
        yield
    finally:
        _set_cache(enabled)


def _set_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    reset_cache()  # JAX remembers the setting of the first program


def _tpu_devices(name: str, kind: str, sizes: Sequence[int]) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"topology {name!r} needs libtpu, XLA's compiler for TPUs, which works without a TPU: "
            "pip install 'jax[tpu]', or use cpu:8"
        )
    # Without these libtpu queries the cloud's metadata server, and warns if that fails.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{kind}-8")
    # Its lock guards a real TPU; plans do not use one.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    # Without them libtpu assumes hosts of 2x2 chips.
    single = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sizes) == 1 else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **single).devices
    except jax.errors.JaxRuntimeError as error:
        more = "" if kind in ("v5e", "v6e") else "x1"
        raise ValueError(
            f"topology {name!r}: libtpu does not support this size ({error}); expected a multiple "
            f"of a host's {kind}:2x2{more}, or a single chip, {kind}:1x1{more}"
        ) from None


def _simulated(name: str, *, count: int) -> Topology:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(f"topology {name!r}: jax was started with {len(devices)} CPU devices")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Topology(name=name, chip=Chip(memory=memory / count), devices=devices[:count])
