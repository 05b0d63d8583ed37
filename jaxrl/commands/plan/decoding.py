"""A decode step of the embedded sampler: bytes that it needs and bytes that XLA moves."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.builders.layout import sampler_layout
from jaxrl.commands.plan.chips import GIB
from jaxrl.commands.plan.resident import KVCache, on_one
from jaxrl.commands.plan.step import Step
from jaxrl.core.precision import sampler_precision
from jaxrl.models import spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import Specs
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.decode_steps import (
    SEGMENT,
    DecodeState,
    RowPlan,
    decode_segment,
    draw_first,
)
from jaxrl.sampling.embedded.draw_token import DrawSettings, draw_settings
from jaxrl.sampling.embedded.kv_cache import prefill
from jaxrl.sampling.embedded.stopping import empty_tail
from jaxrl.sharding.collectives import collectives
from jaxrl.sharding.memory_traffic import MemoryTraffic, memory_traffic
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.transfer import placed


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


def plan_decoding(step: Step, cache: KVCache) -> Decoding:
    """Compiles the embedded sampler's decoding with its largest cache, except for simulated devices
    of a CPU, where bytes say nothing about speed.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler fails for a reason other than memory.
    """
    layout = sampler_layout(step.config.sampler, step.layout)
    policy = sampler_precision(step.config.policy)
    weights = read_weights(step.model.config, step.model.specs, rows=cache.rows)
    weights /= layout.mesh.shape["tensor"] * layout.mesh.shape["expert"]
    found = Decoding(
        rows=cache.rows,
        slots=cache.slots,
        weights=weights * policy.compute.itemsize,
        cache=cache.size,
    )
    if layout.mesh.devices.flat[0].platform == "cpu":
        return found
    return _compiled(step, cache, layout=layout, found=found)


def read_weights(config: DecoderConfig, specs: Specs, *, rows: int) -> float:
    """Counts the weights that a step of so many rows reads: all but an embedding that only looks up
    rows, and of the experts at most those that its tokens choose."""
    total = 0.0
    for path, one in spec.flatten(specs).items():
        if path == "embed" and not config.tied:
            continue
        share = 1.0
        if config.experts is not None and "experts" in one.axes:
            share = min(1.0, rows * config.experts.per_token / config.experts.count)
        total += share * math.prod(one.shape)
    return total


def _compiled(step: Step, cache: KVCache, *, layout: Layout, found: Decoding) -> Decoding:
    config, policy = step.config, sampler_precision(step.config.policy)
    model = step.model._replace(local=layout.local)
    params = placed(spec.abstract(model.specs, dtype=policy.compute), layout.tree(model.specs))
    asked = SamplingParams(
        max_tokens=config.sampling.max_tokens, temperature=config.sampling.temperature, stop=((0,),)
    )
    settings = draw_settings(asked)
    record = config.train.replay_routing and model.config.experts is not None
    state = _state(params, settings, cache, model=model, precision=policy, record_experts=record)
    state = placed(state, _shardings(state, layout))
    floor = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated)
    lowered = decode_segment.lower(
        params, state, floor=floor, settings=settings, model=model, precision=policy
    )
    try:
        program = lowered.compile()
    except RuntimeError as error:
        if (needed := needed_memory(str(error))) is None:
            raise
        temporary = max(0.0, needed - on_one(params) - cache.size)
        return dataclasses.replace(found, temporary=temporary)

    def steps(depth: int) -> int:
        return SEGMENT if depth == 0 else 1

    text, memory = program.as_text() or "", program.memory_analysis()
    moved = memory_traffic(text, trips=steps)
    sent = sum(traffic.sent for traffic in collectives(text, trips=steps).values())
    return dataclasses.replace(
        found,
        temporary=float(memory.temp_size_in_bytes),
        moved=MemoryTraffic(*(size / SEGMENT for size in moved)),
        sent=sent / SEGMENT,
    )


def needed_memory(message: str) -> float | None:
    """Parses the bytes of a program from the compiler's error; None if the error is another one."""
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    return float(match[1]) * GIB * 1024.0 ** ("KMGT".index(match[2]) - 2)


def _state(
    params: Any, settings: DrawSettings, cache: KVCache, *, model: Any, **options: Any
) -> DecodeState:
    """Returns the shapes of a batch with the cache."""

    def begin(params, tokens, lengths, key):
        rows = jnp.zeros_like(lengths)
        tail = jnp.asarray(empty_tail(cache.rows, settings.stops))
        plan = RowPlan(rows, jnp.stack([rows, rows], axis=1), rows, tail)
        held, logits = prefill.__wrapped__(
            params, tokens, lengths, model=model, for_cpu=False, **options
        )
        states, _ = draw_first.__wrapped__(logits, lengths, plan=plan, key=key, settings=settings)
        return DecodeState(held, states)

    tokens = jax.ShapeDtypeStruct((cache.rows, cache.slots), jnp.int32)
    lengths = jax.ShapeDtypeStruct((cache.rows,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(begin, params, tokens, lengths, key)


def _shardings(state: DecodeState, layout: Layout) -> DecodeState:
    """Shards a batch as the sampler's programs leave it: rows over the batch axes, and the cache's
    heads over theirs."""
    rows, heads = (layout.batch((axis,)).spec for axis in ("batch", "kv_heads"))

    def of_cache(path: Any, x: Any) -> NamedSharding:
        # The narrow keys of latent attention are one head.
        parted = path[0].name in ("keys", "values") and x.shape[2] > 1
        axes = (None, *rows, *heads) if parted else (None, *rows)
        return NamedSharding(layout.mesh, PartitionSpec(*axes))

    cache = jax.tree_util.tree_map_with_path(of_cache, state.cache)
    return DecodeState(cache, jax.tree.map(lambda _: layout.batch(("batch",)), state.rows))
