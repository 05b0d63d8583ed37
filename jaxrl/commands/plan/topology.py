"""Devices to compile for that need not exist: TPU topologies and simulated CPU devices."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device, by its vendor's data sheet; None for an unknown rate."""

    memory: float  # bytes
    flops: float | None = None  # FLOPs per second with operands in bf16 or f16
    memory_rate: float | None = None  # memory bandwidth in bytes per second
    link_rate: float | None = None  # bytes per second to its neighbours over all its links


# From https://cloud.google.com/tpu/docs, the pages v5e, v5p and v6e in November 2026; memory is
# the part of the 16, 95 and 32 GB that XLA lets a program use.
CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(memory=15.75 * GIB, flops=197e12, memory_rate=0.819e12, link_rate=200e9),
    "v5p": Chip(memory=95.74 * GIB, flops=459e12, memory_rate=2.765e12, link_rate=600e9),
    "v6e": Chip(memory=31.25 * GIB, flops=918e12, memory_rate=1.638e12, link_rate=400e9),
}

_FORM = "expected v5p:4x4x4, v5e:16x16, v6e:4x4 or cpu:8, or other sizes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to compile for."""

    name: str  # the requested name, e.g. "v5p:4x4x4"
    chip: Chip  # the kind of chip
    devices: Sequence[Any]  # `jax.Device`s; TPU devices can be compiled for, not run on


def open_topology(name: str) -> Topology:
    """Opens a topology by name.

    Call it before anything else uses jax: it makes the CPU the only platform of this process.

    Raises:
      ValueError: for an unknown name.
      ModuleNotFoundError: if libtpu is missing.
      RuntimeError: if libtpu rejects the topology, or jax was started with fewer devices.
    """
    kind, _, shape = name.partition(":")
    if kind not in (*CHIPS, "cpu") or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        raise ValueError(f"topology {name!r}: {_FORM}")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if kind == "cpu":
        return _simulated(name, count=math.prod(map(int, shape.split("x"))))
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"topology {name!r} needs libtpu, XLA's compiler for TPUs, which works without a TPU: "
            "pip install 'jax[tpu]', or use cpu:8"
        )
    # Without these libtpu queries the cloud's metadata server, and warns if there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{kind}-8")
    # Its lock guards a real TPU; plans do not use one.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return Topology(name=name, chip=CHIPS[kind], devices=described.devices)


def _simulated(name: str, *, count: int) -> Topology:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(f"topology {name!r}: jax was started with {len(devices)} CPU devices")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Topology(name=name, chip=Chip(memory=memory / count), devices=devices[:count])
