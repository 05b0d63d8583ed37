"""Lower bounds on the time of a step: FLOPs, memory and links, each at the chip's full rate."""

import dataclasses
import math

from jaxrl import models
from jaxrl.commands.plan.chips import Chip, Products, products
from jaxrl.commands.plan.program import Program
from jaxrl.models import DecoderConfig, Specs, lora, parameter_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a step; None if the chip's rate is unknown."""

    # FLOPs of a step: three times the forward pass, less the gradients of frozen weights.
    model_flops: float
    # The same with recomputation in the backward pass, and with masked products of experts.
    run_flops: float
    products: Products | None  # how the chip computes them
    compute: float | None  # matrix products at the full rate of their units
    memory: float | None  # reads and writes of weights and optimizer state at full memory bandwidth
    links: float | None  # traffic over all of the chip's links

    @property
    def overlapped(self) -> float | None:
        """Seconds if all three overlap fully: the lower bound."""
        known = [s for s in (self.compute, self.memory, self.links) if s is not None]
        return max(known, default=None)

    @property
    def in_turn(self) -> float | None:
        """Seconds if communication never overlaps computation: the upper end of the range."""
        if self.compute is None or self.memory is None or self.links is None:
            return None
        return max(self.compute, self.memory) + self.links


def forward_flops(config: DecoderConfig, specs: Specs, *, rows: int, length: int) -> float:
    """Counts the FLOPs of a forward pass over full rows of one sequence each.

    A token costs two for each weight it is multiplied with, plus the causal half of attention. In a
    linear layer it costs two products with the state and one that changes it.
    """
    heads = config.attention_layers * config.num_heads
    attention = heads * (config.head_dim + config.value_dim) * length**2
    if (linear := config.linear) is not None:
        states = (config.num_layers - config.attention_layers) * linear.value_heads
        attention += states * 6 * linear.key_dim * linear.value_dim * length
    return rows * (2 * active_weights(config, specs) * length + attention)


def active_weights(config: DecoderConfig, specs: Specs) -> float:
    """Counts the weights that a token is multiplied with: its own experts, no embedding."""
    total = 0.0
    for path, one in models.flatten(specs).items():
        is_vector = len(one.shape) < 2 + one.counted  # a norm or a bias
        if is_vector or (path == "embed" and not config.tied):
            continue
        experts = config.experts if "experts" in one.axes else None
        share = 1.0 if experts is None else experts.per_token / experts.count
        total += math.prod(one.shape) * share
    return total


def roofline(program: Program, chip: Chip, *, remat: str) -> Roofline:
    """Computes the roofline of a step; `links` is None if the compiler rejected it."""
    config, specs = program.step.model.config, program.step.model.specs
    rows = program.rows * program.microbatches
    sizes = {"rows": rows, "length": program.row_length}
    forward, masked, frozen = forward_flops(config, specs, **sizes), 0.0, 0.0
    if config.experts is not None and not chip.grouped:
        every = config.experts.per_token * config.experts.count
        more = dataclasses.replace(config.experts, per_token=every)
        masked = forward_flops(dataclasses.replace(config, experts=more), specs, **sizes) - forward
    if isinstance(program.step.specs, lora.Adapted):  # frozen weights need no gradients
        tokens = rows * program.row_length
        forward += 2.0 * tokens * parameter_count(program.step.specs.adapters)
        frozen = 2.0 * tokens * active_weights(config, specs)
    recomputed = 1 if remat in ("layer", "attention") else 0
    mesh = program.step.layout.mesh
    run = forward * (3 + recomputed) - frozen
    run += masked * (3 + recomputed - (frozen > 0))
    compute = memory = links = None
    found = products(program.step.config.precision, chip)
    if found is not None:
        compute = run / mesh.size / found.rate
    if chip.memory_rate is not None:
        # Every pass writes and reads gathered weights; state is read and written once.
        gathered = parameter_count(specs) * program.step.config.precision.compute.itemsize
        gathered /= mesh.shape["tensor"] * mesh.shape["expert"]
        moved = 2 * (3 + recomputed) * gathered * program.microbatches
        moved += 2 * (program.memory.params + program.memory.optimizer + program.memory.gradients)
        memory = moved / chip.memory_rate
    if chip.link_rate is not None and not program.rejected:
        links = sum(traffic.sent for traffic in program.traffic.values()) / chip.link_rate
    return Roofline(
        model_flops=3 * forward - frozen,
        run_flops=run,
        products=found,
        compute=compute,
        memory=memory,
        links=links,
    )
