"""Builds device layouts from the tables of a config that describe meshes."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl import models
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.config.training import Config
from jaxrl.core import Precision, check_products, keep_collectives_ordered
from jaxrl.models import Model
from jaxrl.sampling import prepare_tpu_engine
from jaxrl.sharding import PRESETS, Layout, make_mesh, remesh


def prepare_devices(
    mesh: MeshConfig, sampler: SamplerConfig, *, apart: Mapping[str, int] | None = None
) -> None:
    """Splits the CPU into the devices of [mesh] and those `apart`, by default the sampler's, unless
    the environment sets their number. Call it before jax looks for devices.

    Raises:
      SamplerError: as `prepare_tpu_engine`, for `sampler.name = "vllm_tpu"`.
    """
    if sampler.name == "vllm_tpu":
        prepare_tpu_engine()
    named = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    more = sampler.devices if apart is None else sum(apart.values())
    if more and not named and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", math.prod(mesh.sizes.values()) + more)


def make_layout(
    mesh: MeshConfig,
    *,
    precision: Precision | None = None,
    devices: Sequence[Any] | None = None,
    apart: Mapping[str, int] | None = None,
) -> Layout:
    """Arranges devices in a mesh, with its sharding rules. The last devices are left to others:
    `apart` has their numbers, by key. By default `devices` are all that jax finds, or one if all
    sizes are 1.

    Raises:
      ValueError: if the sizes or rules do not fit the devices, the devices cannot compute products
        as `precision` says, no device is left, or devices of several processes are set apart.
    """
    reserved = sum((apart or {}).values())
    keys = " + ".join(f"{key} = {count}" for key, count in (apart or {}).items())
    alone = devices is None and math.prod(mesh.sizes.values()) == 1 and jax.process_count() == 1
    found = jax.devices() if devices is None else devices
    if devices is None:
        keep_collectives_ordered()
    if reserved and jax.process_count() > 1:
        raise ValueError(
            f"{keys}: devices set apart need a single process, and there are "
            f"{jax.process_count()}; leave them out, or use servers (sampler.name = 'vllm', "
            "reward.model, reference.server)"
        )
    if reserved >= len(found):
        raise ValueError(
            f"{keys} leaves the learner none of {len(found)} devices; lower it, or set "
            "JAX_NUM_CPU_DEVICES to split the CPU into more devices"
        )
    devices = found[:1] if alone else found[: len(found) - reserved]
    if precision is not None:
        check_products(precision, devices[0].platform, devices=len(devices))
    try:
        made = make_mesh(**mesh.sizes, devices=devices)
    except ValueError as error:
        given = [f"mesh.{axis} = {size}" for axis, size in mesh.sizes.items() if size > 1]
        raise ValueError(f"{', '.join(given) or '[mesh]'}: {error}") from error
    return Layout(made, mesh.layout_rules("any" if precision is None else precision.sums))


def own_layout(
    config: Config, table: str, *, shared: Layout, devices: Sequence[Any] | None = None
) -> Layout:
    """Returns the layout of a model beside the policy: the mesh that its table describes, or the
    policy's, `shared`. `devices` are all of the run, by default all that jax finds.

    Raises:
      ValueError: if the mesh's sizes or rules do not fit, or do not divide the rows of the run.
    """
    meshes = config.own_meshes
    if table not in meshes:
        return shared
    if config.row_length % (shards := meshes[table].row_shards):
        raise ValueError(
            f"{table}.context = {meshes[table].context} splits a row into {shards} shards, which "
            f"do not divide {config.row_length} tokens; set train.row_length to a multiple"
        )
    before = [meshes[name].devices for name in [*meshes][: [*meshes].index(table)]]
    first = shared.mesh.size + sum(before)
    found = jax.devices() if devices is None else devices
    mesh = make_mesh(**meshes[table].sizes, devices=found[first : first + meshes[table].devices])
    return Layout(mesh, meshes[table].layout_rules(config.precision.sums))


def sampler_layout(
    config: SamplerConfig, layout: Layout, model: Model, *, sums: str = "any"
) -> Layout:
    """Returns the layout of the embedded sampler: on the learner's devices, or on the last ones
    that jax finds.

    A mesh that cuts weights along a dimension that its products do not cut, such as the one that
    they sum over, would gather all weights for each token. Such a sampler has a mesh of its own
    over the learner's devices, in whose place heads, columns and experts are cut. With fixed `sums`
    nothing is: each device decodes rows with whole weights.

    Raises:
      ValueError: if `sampler.tensor` x `sampler.expert` does not divide the devices.
    """
    asked = {"tensor": config.tensor, "expert": config.expert}
    given = {axis: size for axis, size in asked.items() if size is not None}
    if config.devices:
        mesh = make_mesh(data=config.devices, devices=jax.devices()[-config.devices :])
        sizes = given
    else:
        mesh, fixed = layout.mesh, sums == "fixed"
        whole = mesh.shape["data"] == mesh.size if fixed else not _gathers(layout)
        if whole and not given:
            return layout
        sizes = given if fixed else _parts(mesh.shape, model) | given
    try:
        return Layout(remesh(mesh, **sizes), PRESETS["all"])
    except ValueError as error:
        keys = ", ".join(f"sampler.{axis} = {size}" for axis, size in sizes.items())
        raise ValueError(f"{keys}: {error}") from error


def _gathers(layout: Layout) -> bool:
    """Tells if products gather weights, as `Layout.gather` does."""
    used = dict(layout.rules.activations)
    return any(
        layout.mesh.shape[axis] > 1 and axis not in used.get(logical, ())
        for logical, axes in layout.rules.parameters
        for axis in axes
    )


def _parts(shape: Mapping[str, int], model: Model) -> dict[str, int]:
    """Chooses the parts of products and of experts that a mesh's shards of a row are used for."""
    free = shape["fsdp"] * shape["context"] * shape["tensor"]
    config = model.config
    heads = {config.num_kv_heads, config.num_heads}
    if config.linear is not None:
        heads |= {config.linear.key_heads, config.linear.value_heads}
    sizes: dict[str, set[int]] = {"tensor": {free} | heads, "expert": {0}}
    rules = dict(PRESETS["all"].parameters)
    for spec in models.flatten(model.specs).values():
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            for cut in {"tensor", "expert"} & {*rules[axis]}:
                sizes[cut].add(size)
    tensor = math.gcd(*sizes["tensor"])
    experts = math.gcd(*sizes["expert"])
    expert = math.gcd(free // tensor * shape["expert"], experts) if experts else 1
    return {"tensor": tensor, "expert": expert}
