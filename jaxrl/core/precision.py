"""Dtype policies: every dtype of a run is named here and nowhere else.

A `Precision` is frozen and hashable, so it can be a static argument of a compiled function. It
reads from and prints to one line, which is what a config file and a run directory hold::

    >>> str(parse("bf16_master"))
    'params=f32,compute=bf16,activations=bf16,logits=f32,grads=f32,moments=f32,wire=bf16,...'
    >>> parse("bf16_master,wire=f32").wire
    dtype('float32')
"""

import dataclasses
import difflib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

DType = np.dtype
Tree = TypeVar("Tree")

_DTYPES: dict[str, DType] = {
    "f64": jnp.dtype(jnp.float64),
    "f32": jnp.dtype(jnp.float32),
    "bf16": jnp.dtype(jnp.bfloat16),
    "f16": jnp.dtype(jnp.float16),
    "f8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
}
_SHORT = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleSpec:
    """How the loss is scaled before the backward pass (Micikevicius et al. 2018, arXiv:1710.03740).

    Attributes:
      initial: the first scale; 1 means that nothing is scaled.
      growth: factor applied after `interval` consecutive finite steps; 1 keeps the scale fixed.
      backoff: factor applied when a gradient is not finite; 1 keeps the scale fixed.
      interval: number of finite steps between two growths.
      floor: the scale never falls below this.

    Raises:
      ValueError: for a number that is out of range.
    """

    initial: float = 1.0
    growth: float = 1.0
    backoff: float = 1.0
    interval: int = 400
    floor: float = 1.0

    def __post_init__(self) -> None:
        finite = 0 < self.initial <= 2.0**126 and 1 <= self.growth < float("inf")
        if not (finite and 0 < self.backoff <= 1 and self.interval >= 1 and self.floor > 0):
            raise ValueError(
                f"{self!r}: needs initial > 0, growth >= 1, 0 < backoff <= 1, interval >= 1 and "
                "floor > 0, all finite"
            )

    def __str__(self) -> str:
        if self == LossScaleSpec():
            return "none"
        if self == LossScaleSpec(initial=self.initial):
            return f"static:{_number(self.initial)}"
        numbers = [self.initial, self.interval]
        if self != dynamic_loss_scale(self.initial, self.interval):
            numbers += [self.growth, self.backoff, self.floor]
        return ":".join(["dynamic", *map(_number, numbers)])


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if "e" not in short and float(short) == value else repr(value)


def dynamic_loss_scale(initial: float = 2.0**16, interval: int = 400) -> LossScaleSpec:
    """x2 after `interval` finite steps, x0.5 and a skipped step on a non-finite gradient."""
    return LossScaleSpec(initial=initial, growth=2.0, backoff=0.5, interval=interval)


def parse_loss_scale(text: str) -> LossScaleSpec:
    """Reads `none`, `static:SCALE`, `dynamic[:SCALE[:INTERVAL]]` or
    `dynamic:SCALE:INTERVAL:GROWTH:BACKOFF:FLOOR`.

    Raises:
      ValueError: for any other text; the message names it.
    """
    kind, *numbers = text.split(":")
    try:
        if kind == "none" and not numbers:
            spec = LossScaleSpec()
        elif kind == "static" and len(numbers) == 1:
            spec = LossScaleSpec(initial=float(numbers[0]))
        elif kind == "dynamic" and len(numbers) <= 2:
            initial, interval = [*numbers, *("65536", "400")[len(numbers) :]]
            spec = dynamic_loss_scale(float(initial), int(interval))
        elif kind == "dynamic" and len(numbers) == 5:
            initial, growth, backoff, floor = (float(numbers[i]) for i in (0, 2, 3, 4))
            spec = LossScaleSpec(
                initial=initial,
                growth=growth,
                backoff=backoff,
                interval=int(numbers[1]),
                floor=floor,
            )
        else:
            raise ValueError
        return spec
    except ValueError:
        raise ValueError(
            f"loss_scale={text!r} is not a loss scale; use 'none', 'static:1024' or "
            "'dynamic:65536:400' (first scale, finite steps between two doublings)"
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype policy of one run.

    Attributes:
      params: master weights and the optimizer's update.
      compute: weights and operands of every matrix product of the forward and backward pass. All
        products accumulate in f32 (f64 if `compute` is f64).
      activations: the residual stream and what lies between two matrix products.
      logits: what the head's output is rounded to, and the log-probs made of it. The sums of the
        softmax, ratios and reductions of a loss have at least f32 whatever is here.
      grads: gradient accumulation over microbatches and reduction over devices.
      moments: optimizer moments.
      wire: the weights that are published to the sampler. f8_e4m3 is for this role alone, and for
        the embedded sampler: weights rounded to 8 bits, as engines with quantised weights have.
      sampler: what the sampler computes in.
      loss_scale: how the loss is scaled before the backward pass.

    Raises:
      ValueError: for a role that cannot have its dtype.
    """

    params: DType
    compute: DType
    activations: DType
    logits: DType
    grads: DType
    moments: DType
    wire: DType
    sampler: DType
    loss_scale: LossScaleSpec = LossScaleSpec()

    def __post_init__(self) -> None:
        for role in ROLES:
            if role != "wire" and getattr(self, role).itemsize == 1:
                raise ValueError(
                    f"{role}={_SHORT[getattr(self, role)]}: nothing is computed in 8 bits; only "
                    "wire may have them"
                )

    @property
    def exported(self) -> DType:
        """What a trained model is written in: `wire`, or `sampler` where that has 8 bits."""
        return self.wire if self.wire.itemsize > 1 else self.sampler

    def __str__(self) -> str:
        fields = [(role, _SHORT[getattr(self, role)]) for role in ROLES]
        return ",".join(f"{k}={v}" for k, v in [*fields, ("loss_scale", str(self.loss_scale))])

    @property
    def accumulate(self) -> DType:
        """Dtype that matrix products accumulate in and return before the cast to `activations`."""
        return jnp.promote_types(self.compute, jnp.float32)


def short_name(dtype: DType) -> str:
    """f32, bf16, f16, f64 or f8_e4m3."""
    return _SHORT[dtype]


ROLES = tuple(f.name for f in dataclasses.fields(Precision) if f.name != "loss_scale")


def _preset(*, loss_scale: LossScaleSpec | None = None, **roles: str) -> Precision:
    names = dict.fromkeys(ROLES, "f32") | roles
    dtypes: dict[str, Any] = {role: _DTYPES[name] for role, name in names.items()}
    return Precision(**dtypes, loss_scale=loss_scale or LossScaleSpec())


_HALF_ROLES = ("compute", "activations", "wire", "sampler")

PRESETS: dict[str, Precision] = {
    "fp32": _preset(),
    # Everything but reductions and moments in bf16: the smallest memory, the largest mismatch.
    "bf16": _preset(**dict.fromkeys((*_HALF_ROLES, "params", "grads"), "bf16")),
    # f32 master weights, bf16 everywhere that the sampler computes in bf16: a matched policy.
    "bf16_master": _preset(**dict.fromkeys(_HALF_ROLES, "bf16")),
    # f32 master weights, f16 on both sides with dynamic loss scaling (arXiv:2510.26788).
    "fp16_master": _preset(**dict.fromkeys(_HALF_ROLES, "f16"), loss_scale=dynamic_loss_scale()),
    # f32 trainer and bf16 sampler: the mismatch that causes phantom clipping, for experiments.
    "phantom": _preset(wire="bf16", sampler="bf16"),
}


def parse(text: str) -> Precision:
    """Reads a preset's name, a preset with changes, or a full policy.

    Args:
      text: for example `"fp16_master"`, `"bf16_master,logits=bf16"`, or the string form of a
        `Precision` with every role in it.

    Raises:
      ValueError: for an unknown preset, role or dtype, a role given twice, or a role that is
        missing from a full policy; the message lists what exists.
    """
    first, *rest = (part.strip() for part in text.split(","))
    assignments = rest if "=" not in first else [first, *rest]
    if "=" not in first and first not in PRESETS:
        near = difflib.get_close_matches(first, PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"there is no preset {first!r}{hint}; presets are {', '.join(PRESETS)}, or name every "
            f"role: {', '.join(f'{r}=f32' for r in ROLES)}"
        )
    changes: dict[str, Any] = {}
    for part in assignments:
        role, _, value = part.partition("=")
        if role in changes:
            raise ValueError(f"precision={text!r}: {role} is given twice")
        if role == "loss_scale":
            changes[role] = parse_loss_scale(value)
        elif role not in ROLES:
            known = ", ".join((*ROLES, "loss_scale"))
            raise ValueError(f"precision={text!r}: there is no role {role!r}; roles are {known}")
        elif value not in _DTYPES:
            raise ValueError(
                f"precision={text!r}: {role}={value!r} is not a dtype; dtypes are "
                f"{', '.join(_DTYPES)}"
            )
        else:
            changes[role] = _DTYPES[value]
    if first in PRESETS:
        return dataclasses.replace(PRESETS[first], **changes)
    missing = [role for role in ROLES if role not in changes]
    if missing:
        raise ValueError(
            f"precision={text!r}: a policy without a preset must name every role; "
            f"missing: {', '.join(missing)}"
        )
    return Precision(**changes)


def sampler_precision(precision: Precision) -> Precision:
    """The policy of a forward pass that computes as the sampler does: operands and activations in
    `sampler`, log-probs in `logits`."""
    return dataclasses.replace(
        precision,
        params=precision.exported,
        compute=precision.sampler,
        activations=precision.sampler,
        loss_scale=LossScaleSpec(),
    )


def disagreement(precision: Precision) -> str | None:
    """How the learner's forward pass differs from the sampler's, and what to do; None if both
    compute with the same weights in the same dtypes."""
    differing = _differing(precision)
    if not differing:
        return None
    roles = ", ".join(f"{role} = {_SHORT[getattr(precision, role)]}" for role in differing)
    same_sampler = {k: p for k, p in PRESETS.items() if p.sampler == precision.sampler}
    matched = " or ".join(repr(k) for k, p in same_sampler.items() if not _differing(p))
    return (
        f"{roles} and sampler = {_SHORT[precision.sampler]}, so that ratios measure arithmetic "
        f"(phantom clipping). Use precision = {matched}, or the ratio shadowed"
    )


def _differing(precision: Precision) -> list[str]:
    sampler = precision.sampler
    roles = [r for r in ("compute", "activations") if getattr(precision, r) != sampler]
    # A wire that cannot hold the sampler's numbers is a rounding that the learner lacks.
    wire = precision.wire
    holds = wire.itemsize > 1 and jnp.promote_types(wire, sampler) == wire
    return roles if holds else [*roles, "wire"]


def cast(tree: Tree, dtype: DType) -> Tree:
    """Casts the floating-point leaves of a tree; leaves others as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@struct.dataclass
class LossScale:
    """State of the loss scale, part of the learner's state and of its checkpoint."""

    scale: jax.Array  # f32[]
    good_steps: jax.Array  # i32[], finite steps since the scale last changed
    skipped: jax.Array  # i32[], steps skipped so far because a gradient was not finite


def init_loss_scale(spec: LossScaleSpec) -> LossScale:
    """The state before the first step."""
    return LossScale(scale=jnp.float32(spec.initial), good_steps=jnp.int32(0), skipped=jnp.int32(0))


def update_loss_scale(state: LossScale, finite: jax.Array, *, spec: LossScaleSpec) -> LossScale:
    """The state after a step whose gradients were all finite, or not (`finite`, bool[])."""
    grown = finite & (state.good_steps + 1 >= spec.interval)
    factor = jnp.where(finite, jnp.where(grown, spec.growth, 1.0), spec.backoff)
    # Growth stops below f32's largest power of two: an infinite scale could never come back.
    scale = jnp.clip(state.scale * factor, spec.floor, 2.0**126)
    return LossScale(
        scale=jnp.where(factor == 1.0, state.scale, scale),
        good_steps=jnp.where(finite & ~grown, state.good_steps + 1, 0),
        skipped=state.skipped + (~finite).astype(jnp.int32),
    )


def as_served(params: Tree, precision: Precision) -> Tree:
    """Rounds parameters as a publish does: to `wire`, then to the `sampler`'s dtype."""
    # The barrier keeps XLA from leaving out a rounding that the second cast seems to undo.
    wire = jax.lax.optimization_barrier(cast(params, precision.wire))
    return cast(wire, precision.sampler)
