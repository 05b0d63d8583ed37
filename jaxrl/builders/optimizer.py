"""Builds the optimizer from its config table, and places its state on the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl import learner
from jaxrl.config.optimizer import OptimizerConfig
from jaxrl.models import lora
from jaxrl.sharding import Layout

_HOST = "pinned_host"  # jax's name for host memory that devices can copy from


class Optimizer(NamedTuple):
    """An optimizer, and its learning rate as a function of the step."""

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule


def make_optimizer(config: OptimizerConfig, *, total_steps: int, specs: Any) -> Optimizer:
    """Makes the optimizer of a run of `total_steps` optimizer steps. `specs` are those of its
    parameters: the model's, or `lora.Adapted`."""
    schedule = learner.make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
    )
    transformation = learner.make_optimizer(
        config.name,
        schedule,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        specs=lora.trainable(specs),
    )
    return Optimizer(transformation, schedule)


def state_shardings(
    config: OptimizerConfig, init: Callable[[Any], Any], params: Any, *, layout: Layout, specs: Any
) -> Any:
    """Returns the shardings of the state that `init(params)` makes, as a tree of the same
    structure. `params` are arrays or shapes, `specs` as in `make_optimizer`. `optimizer.offload`
    places the moments in host memory.

    Raises:
      ValueError: for `offload` on devices without access to host memory.
    """
    state = jax.eval_shape(init, params)
    shardings = layout.state(state, lora.declared(specs))
    if not config.offload:
        return shardings
    devices = list(layout.mesh.devices.flat)
    own = [d for d in devices if d.process_index == jax.process_index()]
    device = [*own, *devices][0]  # a device of another process does not list its memories
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST not in kinds:
        raise ValueError(
            f"optimizer.offload = true needs the memory {_HOST}, but {device.device_kind} has only "
            f"{', '.join(kinds)}; leave it out"
        )
    moments = jax.tree.map(
        lambda x, sharding: sharding.with_memory_kind(_HOST) if x.ndim else sharding,
        state.opt_state,
        shardings.opt_state,
    )
    return dataclasses.replace(shardings, opt_state=moments)
