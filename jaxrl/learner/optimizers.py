"""Optimizers and learning-rate schedules by name, composed from optax."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax

from jaxrl.models.spec import ParamSpec, is_spec

OptimizerName = Literal["adamw", "muon", "sgd"]
"""An optimizer of `make_optimizer`."""
ScheduleName = Literal["constant", "cosine", "linear"]
"""The course of a learning rate after its warmup."""


def make_schedule(
    name: ScheduleName, *, learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
    """Builds a schedule: linear warm-up from 0 over `warmup_steps`, then constant, or cosine or
    linear decay to 0 at `total_steps`, both in optimizer steps.

    Raises:
      ValueError: if the warm-up is not shorter than the run.
    """
    if not 0 <= warmup_steps < max(total_steps, 1):
        raise ValueError(
            f"warmup_steps={warmup_steps} must be at least 0 and below the {total_steps} "
            "optimizer steps of the run"
        )
    decay_steps = total_steps - warmup_steps
    after = {
        "constant": optax.constant_schedule(learning_rate),
        "cosine": optax.cosine_decay_schedule(learning_rate, decay_steps),
        "linear": optax.linear_schedule(learning_rate, 0.0, decay_steps),
    }[name]
    if warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
    name: OptimizerName,
    schedule: optax.Schedule,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_norm: float | None,
    specs: Mapping[str, Any],
) -> optax.GradientTransformation:
    """Builds an optimizer: gradient clipping by global norm, then the update rule.

    Weight decay is decoupled and applies to matrices only, not to norms and biases. Muon (Jordan et
    al. 2024) orthogonalises the momentum of each layer's matrices and uses AdamW for embedding,
    head and vectors. For `sgd`, betas[0] is the momentum.
    """
    matrices = jax.tree.map(_is_matrix, dict(specs), is_leaf=is_spec)
    if name == "adamw":
        chain = optax.adamw(
            schedule, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mask=matrices
        )
    elif name == "muon":
        muon = optax.contrib.muon(
            schedule,
            beta=betas[0],
            eps=eps,
            adam_b1=betas[0],
            adam_b2=betas[1],
            muon_weight_dimension_numbers=jax.tree.map(_muon_axes, dict(specs), is_leaf=is_spec),
        )
        # optax's weight decay for Muon would skip embedding and head.
        chain = optax.chain(muon, _decay(schedule, weight_decay, mask=matrices))
    else:
        sgd = optax.sgd(schedule, momentum=betas[0] or None)
        chain = optax.chain(sgd, _decay(schedule, weight_decay, mask=matrices))
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    return optax.chain(clip, chain)


def _decay(
    schedule: optax.Schedule, weight_decay: float, *, mask: Any
) -> optax.GradientTransformation:
    """Subtracts learning rate x weight decay x parameter from updates where `mask` holds."""
    alone = optax.chain(
        optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(schedule)
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        decayed, state = alone.update(optax.tree.zeros_like(updates), state, params)
        return optax.tree.add(updates, decayed), state

    return optax.GradientTransformation(alone.init, update)


def _is_matrix(spec: ParamSpec) -> bool:
    return len(spec.shape) - spec.counted >= 2


def _muon_axes(spec: ParamSpec) -> Any:
    if not _is_matrix(spec) or {"vocab", "label"} & set(spec.axes):
        return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)


def usual_learning_rates(parameters: int, *, adapters: bool) -> tuple[float, float]:
    """Returns the lowest and the highest usual learning rate of AdamW for a model of that size.

    The middle is 1e-6 from a billion parameters up, as in published recipes (DAPO and Dr. GRPO, 1.5
    to 32 billion). Below, it grows with the inverse square root of the size, to 1e-4 for the 10^5
    of the quickstart. Adapters take ten times as much (Schulman et al., LoRA Without Regret, 2025).
    """
    middle = max(1e-6, 1e-4 * math.sqrt(1e5 / parameters)) * (10 if adapters else 1)
    return middle / 3, middle * 3
