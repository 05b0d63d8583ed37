"""The `[optimizer]` table of a config."""

from collections.abc import Iterator
from typing import Annotated

import jax.numpy as jnp
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from jaxrl.config.section import Section
from jaxrl.core import Precision, short_name
from jaxrl.learner import OptimizerName, ScheduleName


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: OptimizerName = "adamw"
    """Update rule; muon applies to matrices and uses adamw for all other parameters."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""

    schedule: ScheduleName = "constant"
    """Learning rate after warmup: constant, or decaying to 0 at the last optimizer step."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Field(strict=False),
    ] = (0.9, 0.95)
    """Decay of the first and second moment; sgd and muon use the first as momentum."""

    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, applied to matrices only."""

    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; `none` disables clipping."""

    offload: bool = False
    """Keep the moments in host memory between steps: saves device memory, slows steps down."""

    def conflicts(self, precision: Precision, *, steps: int) -> Iterator[str]:
        """Yields a line if the warmup covers all of the optimizer `steps`, and one if moments could
        never fall, because a beta times one rounds back to it."""
        if self.warmup_steps >= steps:
            yield (
                f"optimizer.warmup_steps = {self.warmup_steps} covers all of the run's {steps} "
                "optimizer steps; lower it"
            )
        highest = 1 - float(jnp.finfo(precision.moments).eps) / 2
        if max(self.betas[: 1 if self.name == "sgd" else 2]) > highest:
            yield (
                f"optimizer.betas = {list(self.betas)} and moments={short_name(precision.moments)} "
                f"in precision = {precision.text!r}: a beta above {highest:.3g} times a moment "
                "rounds back to it, so that it never falls; lower the beta, or use moments=f32"
            )
