"""Builds device layouts from the `[mesh]` table of a config."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core.precision import Precision, check_products
from sharding.mesh import make_mesh
from sharding.partition import Layout
from sharding.rules import PRESETS


def make_layout(
    mesh: MeshConfig, *, policy: Precision | None = None, devices: Sequence[Any] | None = None
) -> Layout:
    """Arranges devices in a mesh, with its sharding rules. `devices` are all used; by default they
    are those that jax finds, or one if all sizes are 1.

    Raises:
      ValueError: if the product of the sizes is not the number of devices, a rule does not fit, or
        the devices cannot compute products as `policy` says.
    """
    if devices is None:
        alone = math.prod(mesh.sizes.values()) == 1 and jax.process_count() == 1
        devices = jax.devices()[:1] if alone else jax.devices()
    if policy is not None:
        check_products(policy, devices[0].platform, devices=len(devices))
    try:
        made = make_mesh(**mesh.sizes, devices=devices)
    except ValueError as error:
        given = [f"mesh.{axis} = {size}" for axis, size in mesh.sizes.items() if size > 1]
        raise ValueError(f"{', '.join(given) or '[mesh]'}: {error}") from error
    return Layout(made, mesh.layout_rules)


def sampler_layout(config: SamplerConfig, layout: Layout) -> Layout:
    """Returns the layout of the embedded sampler on the learner's devices."""
    return layout if config.rules is None else Layout(layout.mesh, PRESETS[config.rules])
