"""A decode step of the embedded sampler: bytes that it needs and bytes that XLA moves."""

import dataclasses
import math
import re
from typing import Any

from jaxrl import models
from jaxrl.builders.layout import sampler_layout
from jaxrl.commands.plan.chips import GIB
from jaxrl.commands.plan.resident import KVCache, on_one
from jaxrl.commands.plan.step import PlannedStep
from jaxrl.commands.plan.topology import Topology
from jaxrl.core import sampler_precision
from jaxrl.models import DecoderConfig, Specs
from jaxrl.sampling import SamplingParams, decode_program
from jaxrl.sharding import Layout, MemoryTraffic, collectives, memory_traffic, placed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """A decode step of all rows with the largest cache; bytes on one device."""

    rows: int  # over all devices
    slots: int  # tokens that fit in a row
    weights: float  # that a step must read
    cache: float  # that a step must read
    # Of the compiled program besides its weights and its cache; None if it was not compiled.
    temporary: float | None = None
    # Of the compiled program per step; None without a program.
    moved: MemoryTraffic | None = None
    sent: float = 0.0  # by its collectives

    @property
    def needed(self) -> float:
        """Bytes that a step must read."""
        return self.weights + self.cache


def plan_decoding(step: PlannedStep, cache: KVCache, *, topology: Topology) -> Decoding:
    """Compiles the embedded sampler's decoding with its largest cache, except for simulated devices
    of a CPU, where bytes say nothing about speed.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler fails for a reason other than memory.
    """
    precision = sampler_precision(step.config.precision)
    layout = sampler_layout(step.config.sampler, step.layout, step.model, sums=precision.sums)
    weights = read_weights(step.model.config, step.model.specs, rows=cache.rows)
    weights /= layout.mesh.shape["tensor"] * layout.mesh.shape["expert"]
    found = Decoding(
        rows=cache.rows,
        slots=cache.slots,
        weights=weights * precision.compute.itemsize,
        cache=cache.size,
    )
    if layout.mesh.devices.flat[0].platform == "cpu":
        return found
    return _compiled(step, cache, layout=layout, topology=topology, found=found)


def read_weights(config: DecoderConfig, specs: Specs, *, rows: int) -> float:
    """Counts the weights that a step of `rows` rows reads: all but an untied embedding, and no more
    experts than the tokens choose."""
    total = 0.0
    for path, one in models.flatten(specs).items():
        if path == "embed" and not config.tied:
            continue
        share = 1.0
        if config.experts is not None and "experts" in one.axes:
            share = min(1.0, rows * config.experts.per_token / config.experts.count)
        total += share * math.prod(one.shape)
    return total


def _compiled(
    step: PlannedStep, cache: KVCache, *, layout: Layout, topology: Topology, found: Decoding
) -> Decoding:
    config, precision = step.config, sampler_precision(step.config.precision)
    model = step.model._replace(local=layout.local)
    params = placed(models.abstract(model.specs, dtype=precision.compute), layout.tree(model.specs))
    asked = SamplingParams(
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        min_p=config.sampling.min_p,
        stop=((0,),),
    )
    segment = decode_program(
        model,
        params,
        rows=cache.rows,
        slots=cache.slots,
        sampling=asked,
        precision=precision,
        layout=layout,
        record_experts=config.train.replay_routing and model.config.experts is not None,
    )
    try:
        program = topology.compile(segment.lowered)
    except RuntimeError as error:
        if (needed := needed_memory(str(error))) is None:
            raise
        temporary = max(0.0, needed - on_one(params) - cache.size)
        return dataclasses.replace(found, temporary=temporary)

    text, steps = program.as_text() or "", (segment.tokens,)
    memory: Any = program.memory_analysis()
    moved = memory_traffic(text, trips=steps)
    sent = sum(traffic.sent for traffic in collectives(text, trips=steps).values())
    return dataclasses.replace(
        found,
        temporary=float(memory.temp_size_in_bytes),
        moved=MemoryTraffic(*(size / segment.tokens for size in moved)),
        sent=sent / segment.tokens,
    )


def needed_memory(message: str) -> float | None:
    """Parses the bytes of a program from the compiler's out-of-memory error; None for others."""
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    return float(match[1]) * GIB * 1024.0 ** ("KMGT".index(match[2]) - 2)
