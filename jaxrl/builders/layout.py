"""Builds device layouts from the `[mesh]` table of a config."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core import Precision, check_products
from jaxrl.sharding import PRESETS, Layout, make_mesh


def divide_cpu(mesh: MeshConfig, sampler: SamplerConfig) -> None:
    """Splits the CPU into the devices of [mesh] plus the sampler's, unless the environment sets
    their number. Call it before jax looks for devices."""
    named = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if sampler.devices and not named and "JAX_NUM_CPU_DEVICES" not in os.environ:
        count = math.prod(mesh.sizes.values()) + sampler.devices
        jax.config.update("jax_num_cpu_devices", count)


def make_layout(
    mesh: MeshConfig,
    *,
    precision: Precision | None = None,
    devices: Sequence[Any] | None = None,
    reserved: int = 0,
) -> Layout:
    """Arranges devices in a mesh, with its sharding rules. The last `reserved` devices are left to
    the sampler. By default `devices` are all that jax finds, or one if all sizes are 1.

    Raises:
      ValueError: if the sizes or rules do not fit the devices, the devices cannot compute products
        as `precision` says, no device is left, or devices of several processes are reserved.
    """
    alone = devices is None and math.prod(mesh.sizes.values()) == 1 and jax.process_count() == 1
    found = jax.devices() if devices is None else devices
    if reserved and jax.process_count() > 1:
        raise ValueError(
            f"sampler.devices = {reserved} needs a single process, and there are "
            f"{jax.process_count()}; leave it out, or sample on servers (sampler.name = 'vllm')"
        )
    if reserved >= len(found):
        raise ValueError(
            f"sampler.devices = {reserved} leaves the learner none of {len(found)} devices; lower "
            "it, or set JAX_NUM_CPU_DEVICES to split the CPU into more devices"
        )
    devices = found[:1] if alone else found[: len(found) - reserved]
    if precision is not None:
        check_products(precision, devices[0].platform, devices=len(devices))
    try:
        made = make_mesh(**mesh.sizes, devices=devices)
    except ValueError as error:
        given = [f"mesh.{axis} = {size}" for axis, size in mesh.sizes.items() if size > 1]
        raise ValueError(f"{', '.join(given) or '[mesh]'}: {error}") from error
    return Layout(made, mesh.layout_rules)


def sampler_layout(config: SamplerConfig, layout: Layout) -> Layout:
    """Returns the layout of the embedded sampler: on the learner's devices, or on the last ones
    that jax finds, along the axis that its rules shard."""
    if config.devices:
        axis = config.rules or "data"
        devices = jax.devices()[-config.devices :]
        return Layout(make_mesh(**{axis: config.devices}, devices=devices), PRESETS[axis])
    return layout if config.rules is None else Layout(layout.mesh, PRESETS[config.rules])
