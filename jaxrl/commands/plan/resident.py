"""What lies on the devices besides the step, by arithmetic on shapes and on how they are cut."""

import dataclasses
import math
from typing import Any

import jax

from jaxrl.builders.layout import sampler_layout
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.commands.plan.step import Step, placed
from jaxrl.config.training import Config
from jaxrl.core.precision import DType, Precision, cast
from jaxrl.losses import Need
from jaxrl.models import huggingface, lora, spec
from jaxrl.models.decoder import param_specs
from jaxrl.models.spec import Specs
from jaxrl.sampling.embedded.batch_decoding import cache_sizes, max_rows, shrunk_rows
from jaxrl.sampling.embedded.buckets import count_bucket
from sharding.partition import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """The embedded sampler's cache at its largest.

    Attributes:
      rows: answers that are decoded at once, over all devices.
      slots: tokens that a row has room for at last.
      size: bytes on one device.
      moving: what is there besides for a moment when the cache grows or loses rows: the one before
        it, and the layer that is sent around.
    """

    rows: int
    slots: int
    size: float
    moving: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Besides:
    """Bytes on one device; 0 for what a run does not have.

    Attributes:
      state: what the learner holds between two steps. The step's own figures have it, too.
      sampler: the embedded sampler's own weights; of two versions where it samples while the
        learner works, those of a request in flight and those of the next.
      reference: the frozen policy that loss.kl and reward.kl measure from.
      reward_model: its weights.
      critic: parameters and optimizer of one that is a network of its own.
      published: what a publish adds for a moment: the sampler's next weights, and a copy in the
        wire's dtype where one is made on the way.
      cache: None where servers sample.
      at_once: whether the sampler works while the learner does.
    """

    state: float
    sampler: float
    reference: float
    reward_model: float
    critic: float
    published: float
    cache: Cache | None
    at_once: bool

    @property
    def always(self) -> float:
        """What is there in every phase, without the learner's state."""
        return self.sampler + self.reference + self.reward_model + self.critic

    def phases(self, step: float) -> dict[str, float]:
        """The most that each phase of a run holds, where a step needs `step` bytes. What forward
        passes compute on the way is counted in the step alone."""
        cache = 0.0 if self.cache is None else self.cache.size + self.cache.moving
        while_learning = cache if self.at_once else 0.0
        found = {"learning": step + self.always + while_learning}
        if self.cache is not None:
            found["sampling"] = self.state + self.always + cache
        if self.published:
            found["publishing"] = self.state + self.always + self.published + while_learning
        return found


def besides(config: Config, step: Step) -> Besides:
    """What a run holds besides its step; of a reward model or a critic only config.json is read.

    Raises:
      FileNotFoundError, ValueError: for a reward model or a critic that cannot be used.
    """
    policy, layout = step.policy, step.layout
    embedded = config.sampler.name == "embedded"
    base = step.model.specs
    own = sampler_layout(config.sampler, layout)
    served = _weights(base, own, dtype=policy.sampler) if embedded else 0.0
    # Two casts are one where the dtypes are alike, and nothing is sent where the layouts are.
    sent = layout.mesh.size > 1 and own != layout
    copied = embedded and (policy.wire != policy.sampler or sent)
    merged = isinstance(step.specs, lora.Adapted) and config.lora.publish == "merged"
    wire = _weights(base, layout, dtype=policy.wire) if copied or merged else 0.0
    reference = 0.0
    if Need.REFERENCE in step.recipe.objective.needs or config.reward.kl:
        reference = on_one(lora.trainable(step.state.params), dtype=policy.compute)
    judge = 0.0
    if config.reward.model is not None:
        judge = _weights(_scorer(config.reward.model), layout, dtype=policy.compute)
    moments = 0.0 if config.optimizer.offload else on_one(step.state.opt_state)
    at_once = config.rollouts.max_staleness > 0
    return Besides(
        state=on_one(step.state.params) + moments,
        sampler=served * (2 if at_once else 1),
        reference=reference,
        reward_model=judge,
        critic=_critic(config, layout=layout, policy=policy) if step.recipe.critic else 0.0,
        published=served + wire,
        cache=_cache(config, step, layout=own) if embedded else None,
        at_once=at_once,
    )


def on_one(tree: Any, *, dtype: DType | None = None) -> float:
    """Bytes on one device of a tree of shapes with shardings."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * (dtype or x.dtype).itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def _weights(specs: Specs, layout: Layout, *, dtype: DType) -> float:
    return on_one(placed(spec.abstract(specs, dtype=dtype), layout.tree(specs)))


def _scorer(path: str) -> Specs:
    return param_specs(dataclasses.replace(huggingface.load_config(path), scored=True))


def _critic(config: Config, *, layout: Layout, policy: Precision) -> float:
    if config.critic.trunk == "shared":
        return 0.0  # one more row
    specs = _scorer(config.critic.path or config.model.path)
    params = spec.abstract(specs, dtype=policy.params)
    optimizer = make_optimizer(config.optimizer, total_steps=config.optimizer_steps, specs=specs)
    held = {"params": params}
    if not config.optimizer.offload:
        held["moments"] = jax.eval_shape(
            lambda p: cast(optimizer.transformation.init(p), policy.moments), params
        )
    return on_one(placed(held, layout.state(held, specs)))


def _cache(config: Config, step: Step, *, layout: Layout) -> Cache:
    """As `sampling.batches` makes it. The compiled programs of the sampler cut it as activations
    are: rows over the batch's axes, heads over their own, tokens over none."""
    sizes, shards = step.model.config, layout.count("batch")
    most = max_rows(config.sampling.max_batch, shards=shards)
    rows = most
    if config.data.eval_path is None:
        answers = config.train.train_batch * config.train.group_size
        rows = min(count_bucket(answers, multiple=shards), most)
    # Where an environment answers, sequences that have just begun and others that are nearly
    # finished are decoded together.
    alone = config.environment.name is None
    longest = config.data.max_prompt_tokens if alone else config.longest_sequence - 1
    width, first, *larger = cache_sizes(longest, config.sampling.max_tokens)
    before, slots = [width, first, *larger][-2:]
    numbers = 2 * sizes.num_kv_heads // layout.count("kv_heads") * sizes.head_dim
    layer = numbers * step.policy.sampler.itemsize  # bytes of a token
    if config.train.replay_routing and sizes.experts is not None:
        layer += sizes.experts.per_token * (1 if sizes.experts.count <= 256 else 2)

    def held(*parts: int) -> float:
        return float(sum(parts) // shards * sizes.num_layers * layer)

    def sent(tokens: int) -> float:
        # Rows that change devices: compiled for TPUs, up to 1.4 times a layer of them all.
        return 2.0 * tokens * layer if shards > 1 else 0.0

    grown, begun = held(rows * before, rows * slots), held(rows * width, rows * first)
    begun += sent(rows * width)
    fewer = shrunk_rows(rows, shards=shards)
    shrunk = held(rows * slots, fewer * slots) + sent(fewer * slots)
    size = held(rows * slots)
    return Cache(rows=rows, slots=slots, size=size, moving=max(grown, begun, shrunk) - size)
