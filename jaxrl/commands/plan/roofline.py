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
    # The same with recomputation in the backward pass.
    run_flops: float
    products: Products | None  # how the chip computes them
    compute: float | None  # matrix products at the full rate of their units
    memory: float | None  # all that the program moves, at full memory bandwidth
    links: float | None  # traffic over all of the chip's links
    # Each instruction by itself, at the full rate of its products or of its bytes, whichever takes
    # longer. Products inside of kernels, which the program's text does not show, are at full rate.
    instructions: float | None
    # The same with the compiler's own cycles of each instruction, and kernels by their schedule as
    # far as it was counted; None if it estimates none.
    estimated: float | None

    @property
    def overlapped(self) -> float | None:
        """Seconds if products, memory and links overlap fully: the lower bound."""
        known = [s for s in (self.compute, self.memory, self.links) if s is not None]
        return max(known, default=None)

    @property
    def in_turn(self) -> float | None:
        """Seconds if nothing overlaps: instructions one by one, and links besides."""
        if self.instructions is None or self.links is None:
            return None
        return self.instructions + self.links


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
    """Computes the roofline of a step; a step that the compiler rejected has products alone."""
    config, specs = program.step.model.config, program.step.model.specs
    rows = program.rows * program.microbatches
    sizes = {"rows": rows, "length": program.row_length}
    forward, frozen = forward_flops(config, specs, **sizes), 0.0
    if isinstance(program.step.specs, lora.Adapted):  # frozen weights need no gradients
        tokens = rows * program.row_length
        forward += 2.0 * tokens * parameter_count(program.step.specs.adapters)
        frozen = 2.0 * tokens * active_weights(config, specs)
    recomputed = 1 if remat in ("layer", "attention") else 0
    mesh = program.step.layout.mesh
    run = forward * (3 + recomputed) - frozen
    compute = memory = links = instructions = estimated = None
    found = products(program.step.config.precision, chip)
    if found is not None:
        compute = run / mesh.size / found.rate
    if chip.memory_rate is not None and program.work:
        memory = sum(one.read + one.written for one in program.work) / chip.memory_rate
    if found is not None and chip.memory_rate is not None and program.work:
        limits = [
            max(one.flops / found.rate, (one.read + one.written) / chip.memory_rate)
            for one in program.work
        ]
        hidden = run / mesh.size - sum(one.flops for one in program.work)
        kernels = max(0.0, hidden) / found.rate
        instructions = sum(limits) + kernels
        if chip.clock is not None:
            estimated = sum(one.cycles for one in program.work) / chip.clock
            estimated += max(kernels, program.kernels)
    if chip.link_rate is not None and not program.rejected:
        links = sum(traffic.sent for traffic in program.traffic.values()) / chip.link_rate
    return Roofline(
        model_flops=3 * forward - frozen,
        run_flops=run,
        products=found,
        compute=compute,
        memory=memory,
        links=links,
        instructions=instructions,
        estimated=estimated,
    )
