"""Estimates memory held outside the compiled step from shapes and shardings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl import models
from jaxrl.bridge import token_bytes
from jaxrl.builders.layout import sampler_layout
from jaxrl.builders.learner import holds_reference
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.builders.tpu_engine import engine_cache_tokens, engine_devices
from jaxrl.commands.plan.step import PlannedStep
from jaxrl.core import DType, cast, count_bucket, row_multiple, sampler_precision
from jaxrl.models import Specs, lora, param_specs
from jaxrl.sampling.embedded.batch_decoding import KEPT, cache_sizes, max_rows, shrunk_rows
from jaxrl.sharding import Layout, placed


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """The embedded sampler's KV cache at its largest."""

    rows: int  # completions decoded together, over all devices
    slots: int  # capacity of a row in tokens
    size: float  # bytes on one device
    # Extra bytes while the cache grows or loses rows: the previous cache, the layer in transfer,
    # and the caches of an environment's earlier turns.
    moving: float
    # Extra bytes of the compiled decode step; 0 if it was not compiled.
    decoding: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes on one of the learner's devices; 0 for parts that a run does not have there."""

    state: float  # learner state between two steps, also counted in the step's own memory
    # The embedded sampler's weights; two versions if it samples while the learner trains,
    # for requests in flight and for new ones.
    sampler: float
    reference: float  # the frozen policy of loss.kl and reward.kl
    reward_model: float  # its weights, or a teacher's
    critic: float  # parameters and optimizer of a critic with its own trunk
    # Extra bytes during a publish: the sampler's next weights, and a copy in the wire dtype
    # if one is made.
    published: float
    cache: KVCache | None  # the KV cache; None if servers or other devices sample
    overlapped: bool  # the sampler runs while the learner does
    engine_cache: float = 0.0  # KV cache of vLLM's TPU engine, which only a publish frees
    # Of a model's own devices, by the table of its mesh: weights and optimizer on one of them.
    apart: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def always(self) -> float:
        """Bytes held in every phase, without the learner's state."""
        return self.sampler + self.reference + self.reward_model + self.critic

    def phases(self, step: float) -> dict[str, float]:
        """Returns the peak of each phase of a run, for a step of `step` bytes. Activations of
        forward passes are counted in the step and in decoding only."""
        held = self.cache
        cache = 0.0 if held is None else held.size + max(held.moving, held.decoding)
        while_learning = cache if self.overlapped else 0.0
        found = {"learning": step + self.always + while_learning + self.engine_cache}
        if self.cache is not None or self.engine_cache:
            found["sampling"] = self.state + self.always + cache + self.engine_cache
        if self.published:
            found["publishing"] = self.state + self.always + self.published + while_learning
        return found


def resident_memory(step: PlannedStep) -> ResidentMemory:
    """Estimates the memory of everything outside the step, from config.json files alone.

    Raises:
      FileNotFoundError, ValueError: for an unusable reward model or critic.
    """
    config, precision, layout = step.config, step.config.precision, step.layout
    embedded = config.sampler.name == "embedded"
    shared = embedded and not config.sampler.devices
    base = step.model.specs
    own = layout
    if shared:
        own = sampler_layout(config.sampler, layout, step.model, sums=precision.sums)
    served = _weights(base, own, dtype=precision.sampler) if embedded else 0.0
    # Equal dtypes need one cast only, and equal layouts no transfer.
    sent = layout.mesh.size > 1 and own != layout
    copied = embedded and (precision.wire != precision.sampler or sent)
    merged = isinstance(step.specs, lora.Adapted) and config.lora.publish == "merged"
    wire = _weights(base, layout, dtype=precision.wire) if copied or merged else 0.0
    beside, apart = _beside(step), dict[str, float]()
    for name in step.apart:
        apart[name], beside[name] = beside[name], 0.0
    moments = 0.0 if config.optimizer.offload else on_one(step.state.opt_state)
    overlapped = config.rollouts.max_staleness > 0
    engine = config.sampler.name == "vllm_tpu" and not config.sampler.devices
    engine_weights, engine_cache, engine_part = _engine(step) if engine else (0.0, 0.0, 0.0)
    return ResidentMemory(
        state=on_one(step.state.params) + moments,
        sampler=served * (2 if overlapped else 1) if shared else engine_weights,
        reference=beside["reference_mesh"],
        reward_model=beside["reward_mesh"],
        critic=beside["critic_mesh"],
        published=served + wire + engine_part,
        cache=_cache(step, own) if shared else None,
        overlapped=overlapped,
        engine_cache=engine_cache,
        apart=apart,
    )


def _beside(step: PlannedStep) -> dict[str, float]:
    """Counts the models beside the policy, by the tables of their meshes; 0 for those that the run
    does not have."""
    config, dtype = step.config, step.config.precision.compute
    found = dict.fromkeys(("critic_mesh", "reference_mesh", "reward_mesh"), 0.0)
    if step.recipe.critic:
        found["critic_mesh"] = _critic(step, step.apart.get("critic_mesh", step.layout))
    if holds_reference(config, step.recipe):
        trained = lora.trainable(step.state.params)
        own = step.apart.get("reference_mesh")
        if own is not None:  # with the frozen parameters that adapters change
            trained = placed(step.state.params, own.tree(step.specs))
        found["reference_mesh"] = on_one(trained, dtype=dtype)
    if step.models.scorer is not None:
        specs = param_specs(step.models.scorer.config)
        layout = step.apart.get("reward_mesh", step.layout)
        found["reward_mesh"] = _weights(specs, layout, dtype=dtype)
    return found


def _engine(step: PlannedStep) -> tuple[float, float, float]:
    """Counts the bytes of vLLM's TPU engine on one of its devices: weights, KV cache, and the
    largest tensor of a publish, which one device holds whole and in both dtypes."""
    config, model, precision = step.config, step.model.config, step.config.precision
    sampler = config.sampler
    shards = len(engine_devices(sampler, model, mesh=step.layout.mesh.devices.flat))
    dtype = precision.sampler
    specs = models.flatten(step.model.specs)
    weights = sum(
        math.prod(one.shape) / (shards if len(one.tensor_shape) > 1 else 1)
        for one in specs.values()
    )
    tokens = engine_cache_tokens(sampler, model, dtype=dtype.name)
    if tokens is None:
        tokens = config.sampling.max_batch * config.longest_sequence
    largest = max(math.prod(one.tensor_shape) for one in specs.values())
    return (
        weights * dtype.itemsize,
        tokens * token_bytes(model, dtype.name) / shards,
        float(largest * (precision.wire.itemsize + dtype.itemsize)),
    )


def on_one(tree: Any, *, dtype: DType | None = None) -> float:
    """Counts the bytes on one device of a tree of shapes with shardings."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * (dtype or x.dtype).itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def _weights(specs: Specs, layout: Layout, *, dtype: DType) -> float:
    return on_one(placed(models.abstract(specs, dtype=dtype), layout.tree(specs)))


def _critic(step: PlannedStep, layout: Layout) -> float:
    config, precision = step.config, step.config.precision
    if config.critic.trunk == "shared":
        return 0.0  # a single extra row
    specs = param_specs(step.models.critic.config.as_scorer())
    params = models.abstract(specs, dtype=precision.params)
    optimizer = make_optimizer(config.optimizer, total_steps=config.optimizer_steps, specs=specs)
    held = {"params": params}
    if not config.optimizer.offload:
        held["moments"] = jax.eval_shape(
            lambda p: cast(optimizer.transformation.init(p), precision.moments), params
        )
    return on_one(placed(held, layout.state(held, specs)))


def _cache(step: PlannedStep, layout: Layout) -> KVCache:
    """Sizes the cache of `sampling.embedded`. Like activations it is sharded by row and by head of
    keys and values, not by token; states only by row."""
    config, sizes, shards = step.config, step.model.config, layout.count("batch")
    precision = config.precision
    multiple = row_multiple(shards, precision=sampler_precision(precision))
    most = max_rows(config.sampling.max_batch, shards=multiple)
    rows, one_batch = most, False
    if config.data.eval_path is None:
        completions = config.train.train_batch * config.train.group_size
        rows = min(count_bucket(completions, multiple=multiple), most)
        one_batch = completions <= rows
    # An environment's turns put new and almost finished sequences in one batch.
    single_turn = config.environment.name is None
    longest = config.data.max_prompt_tokens if single_turn else config.longest_sequence - 1
    width, first, *larger = cache_sizes(longest, config.sampling.max_tokens)
    before, slots = [width, first, *larger][-2:]
    heads = sizes.num_kv_heads // layout.count("kv_heads")
    numbers = heads * (sizes.head_dim + sizes.value_dim)
    if precision.latent != "expanded" and (latent := sizes.latent) is not None:
        numbers = latent.kv_rank + latent.rope_dim  # which all heads share
    layer = numbers * precision.sampler.itemsize  # bytes per token
    token = sizes.attention_layers * layer
    if config.train.replay_routing and sizes.experts is not None:
        numbers = sizes.routed_layers * sizes.experts.per_token
        token += numbers * (1 if sizes.experts.count <= 256 else 2)

    row = 0  # bytes of the states of linear layers
    if (linear := sizes.linear) is not None:
        states = linear.value_heads * linear.key_dim * linear.value_dim
        inputs = (linear.width - 1) * linear.channels
        row = states * precision.accumulate.itemsize + inputs * precision.sampler.itemsize
        row *= sizes.num_layers - sizes.attention_layers

    def held_bytes(*parts: tuple[int, int]) -> float:
        """Counts the bytes of caches of (rows, slots)."""
        numbers = sum(rows * slots for rows, slots in parts) // shards * token
        return float(numbers + sum(rows for rows, _ in parts) // shards * row)

    def sent_bytes(tokens: int) -> float:
        # Rows that change devices; compiled for TPUs, at most 1.4 times a layer of all rows.
        return 2.0 * tokens * layer if shards > 1 else 0.0

    grown = held_bytes((rows, before), (rows, slots))
    begun = held_bytes((rows, width), (rows, first))
    begun += sent_bytes(rows * width)
    fewer = shrunk_rows(rows, shards=multiple)
    shrunk = held_bytes((rows, slots), (fewer, slots)) + sent_bytes(fewer * slots)
    size = held_bytes((rows, slots))
    moving = max(grown, begun, shrunk) - size
    hosts = {device.process_index for device in layout.mesh.devices.flat}
    if not single_turn and linear is None and len(hosts) == 1:
        # Caches of earlier turns. A single batch's have shrunk and are freed once the next turn has
        # begun; with several batches some are also held while the cache grows.
        moving = max(moving, size * 4 / 3) if one_batch else moving + KEPT * size
    return KVCache(rows=rows, slots=slots, size=size, moving=moving)
