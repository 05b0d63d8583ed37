"""Bytes that a step would keep with another `train.remat`."""

import math

from jaxrl.commands.plan.step import PlannedStep
from jaxrl.models import flatten


def kept_outputs(step: PlannedStep) -> float:
    """Returns the bytes that a device would keep of all layers in a microbatch for the backward
    pass with remat "matmuls": the outputs of projections and of attention, by their shapes."""
    config, sizes, layout = step.config, step.model.config, step.layout
    tokens = config.microbatch_rows * config.row_length / layout.count("length")
    cut = {axis: layout.count(axis) for axis, _ in layout.rules.activations}
    numbers = sizes.num_layers * sizes.num_heads * sizes.value_dim / cut["q_heads"]
    of_experts = 0.0
    for one in flatten(step.model.specs).values():
        if one.axes[0] == "layers" and len(one.axes) == 3:
            numbers += math.prod(one.shape[:2]) / cut.get(one.axes[1], 1)
        if sizes.experts is not None and one.axes[:3] == ("layers", "experts", "mlp"):
            rows = sizes.experts.per_token * (len(one.axes) == 4)  # none of a bias
            of_experts += one.shape[0] * one.shape[2] * rows / cut["mlp"]
    numbers = numbers / layout.count("batch") + of_experts / layout.count("routed")
    return tokens * numbers * config.precision.activations.itemsize
