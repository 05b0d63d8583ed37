"""How long a step takes at least: work, memory traffic and links, each at the chip's full rate."""

import dataclasses
import math

from jaxrl.commands.plan.program import Program
from jaxrl.commands.plan.topology import Chip
from jaxrl.models import lora, spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import ParamSpec, Specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a step; None where the chip's rates are not known.

    Attributes:
      model_flops: of one step, forward and backward as three times forward, less the gradients of
        frozen weights.
      run_flops: with what the backward pass computes again.
      compute: products at the chip's peak.
      memory: weights and optimizer state through memory as often as the step needs them.
      links: what is sent, over all of the chip's links.
    """

    model_flops: float
    run_flops: float
    compute: float | None
    memory: float | None
    links: float | None

    @property
    def overlapped(self) -> float | None:
        """Seconds if all three went on at once, which nothing undercuts."""
        known = [s for s in (self.compute, self.memory, self.links) if s is not None]
        return max(known, default=None)

    @property
    def in_turn(self) -> float | None:
        """Seconds if sending waits for computing, the other end of the range."""
        if self.compute is None or self.memory is None or self.links is None:
            return None
        return max(self.compute, self.memory) + self.links


def parameter_count(specs: Specs) -> int:
    """All parameters of a model."""
    return sum(math.prod(one.shape) for one in spec.flatten(specs).values())


def forward_flops(config: DecoderConfig, specs: Specs, *, rows: int, length: int) -> float:
    """Of full rows of one sequence each: two for each weight that a token meets (of the experts
    those that it is sent to, of the embedding none), and the causal half of attention."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    return rows * (2 * met_weights(config, specs) * length + attention)


def met_weights(config: DecoderConfig, specs: Specs) -> float:
    """Weights that a token is multiplied with."""
    weights = sum(_met(one, config) for path, one in spec.flatten(specs).items() if path != "embed")
    if config.tied:
        weights += math.prod(specs["embed"].shape)
    return float(weights)


def _met(one: ParamSpec, config: DecoderConfig) -> float:
    """Weights of a matrix that one token is multiplied with; 0 for norms and biases."""
    if len(one.shape) < 2 + one.stacked:
        return 0.0
    experts = config.experts if "experts" in one.axes else None
    share = 1.0 if experts is None else experts.per_token / experts.count
    return math.prod(one.shape) * share


def roofline(program: Program, chip: Chip, *, remat: str) -> Roofline:
    """Of a step; without the links if the compiler refused it."""
    config, specs = program.model.config, program.model.specs
    rows = program.rows * program.microbatches
    forward = forward_flops(config, specs, rows=rows, length=program.row_length)
    spared = 0.0
    if isinstance(program.specs, lora.Adapted):  # frozen weights have no gradients
        tokens = rows * program.row_length
        forward += 2.0 * tokens * parameter_count(program.specs.adapters)
        spared = 2.0 * tokens * met_weights(config, specs)
    again = 1 if remat in ("layer", "attention") else 0
    devices = program.layout.mesh.size
    run = forward * (3 + again) - spared
    compute = memory = links = None
    if chip.flops is not None:
        compute = run / devices / chip.flops
    if chip.memory_rate is not None:
        # Gathered weights are written and read by every pass; state is read and written once.
        gathered = parameter_count(specs) * program.policy.compute.itemsize
        gathered /= program.layout.mesh.shape["tensor"] * program.layout.mesh.shape["expert"]
        moved = 2 * (3 + again) * gathered * program.microbatches
        moved += 2 * (program.memory.params + program.memory.optimizer + program.memory.gradients)
        memory = moved / chip.memory_rate
    if chip.link_rate is not None and not program.refused:
        links = sum(traffic.sent for traffic in program.traffic.values()) / chip.link_rate
    return Roofline(
        model_flops=3 * forward - spared, run_flops=run, compute=compute, memory=memory, links=links
    )
