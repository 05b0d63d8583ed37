"""Bytes that a step would keep with another `train.remat`."""

import math

from jaxrl.commands.plan.step import PlannedStep
from jaxrl.models import flatten


def kept_outputs(step: PlannedStep) -> float:
    """Returns the bytes that a device would keep of all layers in a microbatch for the backward
    pass with remat "matmuls": the outputs of projections and of attention, by their shapes."""
    config, sizes, layout = step.config, step.model.config, step.layout
    tokens = config.microbatch_rows * config.row_length
    tokens /= layout.count("batch") * layout.count("length")
    cut = {axis: layout.count(axis) for axis, _ in layout.rules.activations}
    numbers = sizes.num_layers * sizes.num_heads * sizes.value_dim / cut["q_heads"]
    for one in flatten(step.model.specs).values():
        if one.axes[0] == "layers" and len(one.axes) == 3:
            numbers += math.prod(one.shape[:2]) / cut.get(one.axes[1], 1)
    return tokens * numbers * config.precision.activations.itemsize
