"""Builds the optimizer from its config table, and places its state on the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl.config.tables import (
    OptimizerConfig,
)
from jaxrl.learner import optimizers
from jaxrl.models.spec import Specs
from sharding.partition import Layout

_HOST = "pinned_host"  # jax's name of memory that devices copy from by themselves


class Optimizer(NamedTuple):
    """An optimizer and the learning rate that it uses at each of its steps."""

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule


def make_optimizer(config: OptimizerConfig, *, total_steps: int, specs: Specs) -> Optimizer:
    """The optimizer of a run of `total_steps` optimizer steps."""
    schedule = optimizers.make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
    )
    transformation = optimizers.make_optimizer(
        config.name,
        schedule,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        specs=specs,
    )
    return Optimizer(transformation, schedule)


def state_shardings(
    config: OptimizerConfig,
    init: Callable[[Any], Any],
    params: Any,
    *,
    layout: Layout,
    specs: Specs,
) -> Any:
    """Where the state that `init(params)` returns lies between steps, in the same tree.

    Args:
      config: whether moments are in the host's memory.
      init: of a learner.
      params: arrays, or their shapes.
      layout: of the parameters.
      specs: theirs.

    Raises:
      ValueError: if devices that cannot reach the host's memory are to keep moments there.
    """
    state = jax.eval_shape(init, params)
    shardings = layout.state(state, specs)
    if not config.offload:
        return shardings
    devices = list(layout.mesh.devices.flat)
    own = [d for d in devices if d.process_index == jax.process_index()]
    device = [*own, *devices][0]  # of another process it is not known
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST not in kinds:
        raise ValueError(
            f"optimizer.offload = true: {device.device_kind} has the memories {', '.join(kinds)}, "
            f"and {_HOST} is wanted"
        )
    moments = jax.tree.map(
        lambda x, sharding: sharding.with_memory_kind(_HOST) if x.ndim else sharding,
        state.opt_state,
        shardings.opt_state,
    )
    return dataclasses.replace(shardings, opt_state=moments)
