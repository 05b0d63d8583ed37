"""Training states of many tenants, stacked, so that one program computes a batch of several."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core import Precision, cast, count_bucket, jit, jit_forward, to_floats
from jaxrl.learner import LearnerState, make_update
from jaxrl.models import Model, Params, init, lora, sequence_alignment
from jaxrl.service import stacks
from jaxrl.service.programs import Trained, compute, shadow_logprobs
from jaxrl.service.rows import parts
from jaxrl.service.wire import Batch
from jaxrl.sharding import Layout, fetch, place


class Base(NamedTuple):
    """The model that all tenants start from.

    Attributes:
      model: the decoder.
      params: its weights in `precision.wire`, which nothing changes.
      precision: the dtype policy.
      layout: the devices of all tenants.
    """

    model: Model
    params: Params
    precision: Precision
    layout: Layout


class Kind(NamedTuple):
    """The trained part of a pool's tenants: adapters of one shape, or with rank 0 everything."""

    rank: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Kind":
        """Reads the content of a model or a checkpoint. Earlier servers wrote none about the output
        layer, and made no adapter of it."""
        rank = content["rank"]
        return cls(rank, content["attention"], content["mlp"], content.get("unembed", not rank))


ALPHA = 32.0
"""The LoRA alpha of the Tinker API, for every rank."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Tenant(NamedTuple):
    """All that a tenant's training changes; on the host or on the devices."""

    state: LearnerState
    gradients: Any  # summed since the last optimizer step, in precision.grads, without loss scale


class Scored(NamedTuple):
    """The results of one request: arrays f32[N, K] for each datum, and an uploaded loss's metrics,
    whose losses are f32[] for each. `shadow` are log-probs too, of the weights and in the dtypes
    that the sampler has; empty if not asked for."""

    logprobs: list[np.ndarray]
    losses: list[np.ndarray]
    metrics: Mapping[str, float] = {}
    shadow: Sequence[np.ndarray] = ()


class Pool:
    """Tenants of one kind. Their adapters are stacked, [slots, ...], on one frozen base."""

    def __init__(self, base: Base, kind: Kind, *, tokens: int) -> None:
        """Makes an empty pool.

        Args:
          base: the model.
          kind: what its tenants train.
          tokens: the largest batch of one forward and backward pass, padding included.

        Raises:
          ValueError: if the model has no matrix to adapt.
        """
        self.base, self.kind, self._tokens = base, kind, tokens
        self.specs: Any = base.model.specs
        if kind.rank:
            self.specs = lora.Adapted(
                lora.adapter_specs(base.model.specs, rank=kind.rank, targets=_targets(base, kind)),
                base.model.specs,
                ALPHA,
            )
        holding = functools.partial(_holding, precision=base.precision)
        self._shardings = base.layout.state(
            jax.eval_shape(lambda: holding(self._start(0))),
            self.specs.adapters if isinstance(self.specs, lora.Adapted) else self.specs,
        )
        self._holding = jit_forward(holding, out_shardings=self._shardings)
        self._stacked = jax.tree.map(
            lambda one: NamedSharding(one.mesh, PartitionSpec(None, *one.spec)), self._shardings
        )
        self._stack: Any = None
        self._slots: list[str | None] = []
        self._programs: dict[Any, Any] = {}

    @property
    def tenants(self) -> list[str]:
        """The names of the tenants in a slot."""
        return [name for name in self._slots if name is not None]

    def fresh(self, seed: int) -> Tenant:
        """Makes the state of a new tenant: random A and zero B, or the base's own weights."""
        started = self._start(seed)
        return self.holding(started) if self.kind.rank else self._holding(started)

    def holding(self, trained: Params) -> Tenant:
        """Makes a state with these parameters, before the first step."""
        return self._holding(place(trained, self._shardings.state.params))

    def _start(self, seed: int) -> Params:
        dtype = self.base.precision.params
        if self.kind.rank:
            return init(self.specs.adapters, jax.random.key(seed), dtype=dtype)
        return cast(self.base.params, dtype)

    def add(self, name: str, tenant: Tenant) -> None:
        """Puts a tenant in a free slot. Without one the number of slots doubles."""
        tenant = place(tenant, self._shardings)
        if None not in self._slots:
            count = len(self._slots)
            grown = count_bucket(count + 1)
            more = jax.tree.map(lambda x: np.zeros((grown - count, *x.shape), x.dtype), tenant)
            more = place(more, self._stacked)
            self._stack = more if self._stack is None else stacks.join(self._stack, more)
            self._slots += [None] * (grown - count)
        slot = self._slots.index(None)
        self._stack = stacks.put(self._stack, tenant, slot)
        self._slots[slot] = name

    def remove(self, name: str) -> None:
        """Frees a tenant's slot."""
        self._slots[self._slots.index(name)] = None

    def read(self, name: str) -> Tenant:
        """Returns a copy of a tenant's state."""
        return stacks.take(self._stack, self._slots.index(name))

    def write(self, name: str, tenant: Tenant) -> None:
        """Replaces a tenant's state."""
        tenant = place(tenant, self._shardings)
        self._stack = stacks.put(self._stack, tenant, self._slots.index(name))

    def weights(self, name: str) -> Any:
        """Returns a copy of what a tenant trains."""
        return stacks.take(self._stack.state.params, self._slots.index(name))

    def step(self, name: str, settings: Mapping[str, float]) -> dict[str, float]:
        """Takes an AdamW step with the summed gradients and clears them; returns its metrics.

        `settings` are learning_rate, beta1, beta2, eps, weight_decay and grad_clip_norm (0: none),
        as in `tinker.AdamParams`. Non-finite gradients change the loss scale only.
        """
        numbers = {key: np.float32(settings[key]) for key in _SOME}
        tenant, metrics = self._program("step", _step)(self.read(name), numbers)
        self.write(name, tenant)
        return to_floats(metrics)

    def compute(self, requests: Sequence[tuple[str, Batch]]) -> list[Scored]:
        """Computes requests of several tenants, in one batch where they fit.

        All requests have the same loss, number of targets per token, `forward_only` and `shadow`.
        Gradients of sums over tokens are added to those of the tenants; forward-only requests leave
        them.
        With fixed sums each request has batches of its own, so that its numbers depend on no other.
        """
        if self.base.precision.sums == "fixed":
            return [found for one in requests for found in self._together([one])]
        return self._together(requests)

    def _together(self, requests: Sequence[tuple[str, Batch]]) -> list[Scored]:
        data = [batch.data for _, batch in requests]
        first = requests[0][1]
        rooms: Any = [[[None] * len(one) for _ in range(3 if first.shadow else 2)] for one in data]
        slots = [self._slots.index(name) for name, _ in requests]
        run = self._program(
            (first.loss, first.forward_only),
            functools.partial(compute, loss=first.loss, backward=not first.forward_only),
        )
        shadow = self._program("shadow", shadow_logprobs)
        unit, whole = self.base.layout.count("batch"), self.base.layout.batch(("batch", "length"))
        rows = NamedSharding(whole.mesh, PartitionSpec(None, *whole.spec))
        align = sequence_alignment(self.base.precision)
        for part in parts(data, slots, tokens=self._tokens, unit=unit, align=align):
            count = len(part.arrays["tokens"])
            # Unused entries name a slot that does not exist: read anywhere, written nowhere.
            where = np.full(count, len(self._slots), np.int32)
            where[: len(part.tenants)] = part.tenants
            mine = stacks.gather(
                (self._stack.state.params, self._stack.state.loss_scale.scale), where
            )
            arrays = place(part.arrays, rows)
            gradients, logprobs, losses = run(self.base.params, *mine, arrays)
            if gradients is not None:
                sums = stacks.add(self._stack.gradients, gradients, where)
                self._stack = self._stack._replace(gradients=sums)
            results = [logprobs, losses]
            if first.shadow:
                # With fixed sums learner and sampler compute alike.
                fixed = self.base.precision.sums == "fixed"
                results.append(logprobs if fixed else shadow(self.base.params, mine[0], arrays))
            results = fetch(results)
            for one in part.places:
                size = len(data[one.request][one.index].tokens)
                at = (one.tenant, one.row, slice(one.begin, one.begin + size))
                for room, values in zip(rooms[one.request], results, strict=True):
                    room[one.index] = values[at]
        return [Scored(*room[:2], shadow=room[2] if first.shadow else ()) for room in rooms]

    def _program(self, key: Any, function: Callable[..., Any]) -> Any:
        if key not in self._programs:
            bound = functools.partial(
                function,
                pool=Trained(
                    self.base.model, self.base.precision, ALPHA if self.kind.rank else None
                ),
            )
            every = self.base.layout.replicated  # what each process reads
            gradients = self._stacked.state.params
            options: dict[str, Any] = {"out_shardings": (gradients, every, every)}
            if key == "step":
                options = {"out_shardings": (self._shardings, every), "donate_argnums": 0}
            elif key == "shadow":
                options = {"out_shardings": every}
            elif key[1]:  # forward_only
                options = {"out_shardings": (None, every, every)}
            self._programs[key] = jit(bound, sums=self.base.precision.sums, **options)
        return self._programs[key]


_SOME = dict(
    learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
)


def _optimizer(numbers: Mapping[str, Any]) -> optax.GradientTransformation:
    """AdamW as torch defines it, on every parameter, after clipping by the global norm."""
    limit = jnp.where(numbers["grad_clip_norm"] > 0, numbers["grad_clip_norm"], jnp.inf)
    adamw = optax.adamw(
        numbers["learning_rate"],
        b1=numbers["beta1"],
        b2=numbers["beta2"],
        eps=numbers["eps"],
        weight_decay=numbers["weight_decay"],
    )
    return optax.chain(optax.clip_by_global_norm(limit), adamw)


def _holding(trained: Params, *, precision: Precision) -> Tenant:
    update = make_update(optimizer=_optimizer(_SOME), precision=precision)
    state = update.init(cast(trained, precision.params))
    return Tenant(state, jax.tree.map(lambda x: jnp.zeros(x.shape, precision.grads), state.params))


def _step(tenant: Tenant, numbers: Mapping[str, jax.Array], *, pool: Trained) -> Any:
    update = make_update(optimizer=_optimizer(numbers), precision=pool.precision)
    gradients = cast(tenant.gradients, jnp.dtype(jnp.float32))
    state, metrics = update.apply(tenant.state, gradients)
    return Tenant(state, jax.tree.map(jnp.zeros_like, tenant.gradients)), metrics


def _targets(base: Base, kind: Kind) -> tuple[str, ...]:
    """Lists the modules to adapt, by their names in checkpoints."""
    every = lora.adapter_specs(base.model.specs, rank=1, targets=("*",))
    names = {one.name.split(".")[-3] for one in jax.tree.leaves(every, is_leaf=_is_spec)}
    names.discard(lora.OUTPUT_LAYER)
    attention = {
        name
        for name in names
        if name in _ATTENTION
        or "in_proj" in name
        or name.endswith(("_a_proj", "_b_proj", "mqa", "out_proj"))
    }
    chosen = (attention if kind.attention else set()) | (names - attention if kind.mlp else set())
    if kind.unembed:
        chosen = chosen | {lora.OUTPUT_LAYER}
    return tuple(sorted(chosen))


def _is_spec(x: Any) -> bool:
    return hasattr(x, "axes")
