"""Dtype policies: every dtype of a run is named here and nowhere else.

A `Precision` is frozen and hashable, so it can be a static argument of a compiled function. It
reads from and prints to one line, which is what a config file and a run directory hold::

    >>> str(parse("bf16_master"))
    'params=f32,compute=bf16,activations=bf16,logits=f32,grads=f32,moments=f32,wire=bf16,...'
    >>> parse("bf16_master,wire=f32").wire
    dtype('float32')
    >>> dataclasses.replace(parse("fp32"), logits=jnp.bfloat16) == parse("fp32,logits=bf16")
    True
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
    """The scale of the loss before the backward pass (Micikevicius et al. 2018, arXiv:1710.03740).

    Example:
      >>> str(LossScaleSpec()), str(LossScaleSpec(initial=1024)), str(dynamic_loss_scale())
      ('none', 'static:1024', 'dynamic:65536:400')

    Attributes:
      initial: the first scale; 1 leaves the loss as it is.
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
    """Makes a scale that doubles after `interval` finite steps, and halves and skips a step on a
    non-finite gradient.

    Example:
      >>> dynamic_loss_scale(1024.0, 100)
      LossScaleSpec(initial=1024.0, growth=2.0, backoff=0.5, interval=100, floor=1.0)
    """
    return LossScaleSpec(initial=initial, growth=2.0, backoff=0.5, interval=interval)


def parse_loss_scale(text: str) -> LossScaleSpec:
    """Reads `none`, `static:SCALE`, `dynamic[:SCALE[:INTERVAL]]` or
    `dynamic:SCALE:INTERVAL:GROWTH:BACKOFF:FLOOR`.

    Example:
      >>> parse_loss_scale("dynamic:1024") == dynamic_loss_scale(1024.0, 400)
      True

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

    Each role takes a dtype, a scalar type such as jnp.bfloat16, or a short name; `loss_scale` takes
    a spec or its text.

    Example:
      >>> roles = dict.fromkeys(ROLES, jnp.float32) | {"wire": "bf16"}
      >>> Precision(**roles, loss_scale="static:8") == parse("fp32,wire=bf16,loss_scale=static:8")
      True

    Attributes:
      params: master weights and the optimizer's update.
      compute: weights and operands of every matrix product of the forward and backward pass. All
        products accumulate in f32 (f64 if `compute` is f64).
      activations: the residual stream and the values between two matrix products.
      logits: the head's output and the log-probs made of it. The sums of the softmax, ratios and
        reductions of a loss always have at least f32.
      grads: gradient accumulation over microbatches and reduction over devices.
      moments: optimizer moments.
      wire: the weights that are published to the sampler. f8_e4m3 is for this role alone, and for
        the embedded sampler: weights rounded to 8 bits, as engines with quantised weights have.
      sampler: operands and activations of the sampler.
      loss_scale: the scale of the loss before the backward pass.

    Raises:
      ValueError: for a role that cannot have its dtype; the message names the role, the value and
        the names of dtypes.
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
            dtype = _as_dtype(getattr(self, role), role=role)
            object.__setattr__(self, role, dtype)
            if role != "wire" and dtype.itemsize == 1:
                raise ValueError(
                    f"{role}={_SHORT[dtype]}: nothing is computed in 8 bits; use another dtype, or "
                    "give 8 bits to wire alone"
                )
        if isinstance(self.loss_scale, str):
            object.__setattr__(self, "loss_scale", parse_loss_scale(self.loss_scale))

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Reads a policy from one line; see `parse`."""
        return parse(text)

    @property
    def exported(self) -> DType:
        """Dtype of a trained model's files: `wire`, or `sampler` where `wire` has 8 bits."""
        return self.wire if self.wire.itemsize > 1 else self.sampler

    def __str__(self) -> str:
        fields = [(role, _SHORT[getattr(self, role)]) for role in ROLES]
        return ",".join(f"{k}={v}" for k, v in [*fields, ("loss_scale", str(self.loss_scale))])

    @property
    def accumulate(self) -> DType:
        """Dtype that matrix products accumulate in and return before the cast to `activations`."""
        return jnp.promote_types(self.compute, jnp.float32)


def _as_dtype(value: Any, *, role: str) -> DType:
    if isinstance(value, str):
        dtype = _DTYPES.get(value)
    elif isinstance(value, type) and value is not float:  # numpy's float is f64, jax's f32
        dtype = np.dtype(value)
    else:
        dtype = value
    if not (isinstance(dtype, np.dtype) and dtype in _SHORT):
        raise ValueError(
            f"{role}={value!r} is not a dtype; dtypes are {', '.join(_DTYPES)}, or types such as "
            "jnp.bfloat16"
        )
    return dtype


def short_name(dtype: DType) -> str:
    """Returns f32, bf16, f16, f64 or f8_e4m3.

    Example:
      >>> short_name(jnp.dtype(jnp.bfloat16))
      'bf16'
    """
    return _SHORT[dtype]


ROLES = tuple(f.name for f in dataclasses.fields(Precision) if f.name != "loss_scale")


def _preset(*, loss_scale: LossScaleSpec | None = None, **roles: str) -> Precision:
    names: dict[str, Any] = dict.fromkeys(ROLES, "f32") | roles
    return Precision(**names, loss_scale=loss_scale or LossScaleSpec())


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

    Example:
      >>> policy = parse("fp16_master,logits=bf16,loss_scale=dynamic:1024")
      >>> policy.compute, policy.logits, str(policy.loss_scale)
      (dtype('float16'), dtype(bfloat16), 'dynamic:1024:400')
      >>> parse(str(policy)) == policy
      True

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
            raise ValueError(f"precision={text!r}: {role} is given twice; give it once")
        if role not in (*ROLES, "loss_scale"):
            known = ", ".join((*ROLES, "loss_scale"))
            raise ValueError(f"precision={text!r}: there is no role {role!r}; roles are {known}")
        changes[role] = value
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
    """Returns the policy of a forward pass that computes as the sampler does: operands and
    activations in `sampler`, log-probs in `logits`.

    Example:
      >>> phantom = parse("phantom")
      >>> phantom.compute, sampler_precision(phantom).compute
      (dtype('float32'), dtype(bfloat16))
    """
    return dataclasses.replace(
        precision,
        params=precision.exported,
        compute=precision.sampler,
        activations=precision.sampler,
        loss_scale=LossScaleSpec(),
    )


def disagreement(precision: Precision) -> str | None:
    """Describes the difference of the learner's forward pass from the sampler's, and the remedy;
    None if both compute with the same weights in the same dtypes.

    Example:
      >>> disagreement(parse("bf16_master")) is None
      True
      >>> print(disagreement(parse("bf16_master,activations=f32")))
      activations = f32 and sampler = bf16, so that ratios measure arithmetic (phantom clipping).
      Use precision = 'bf16' or 'bf16_master', or the ratio shadowed
    """
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
    """Casts the floating-point leaves of a tree; leaves others as they are.

    Example:
      >>> cast({"ids": jnp.zeros(1, int), "w": jnp.zeros(1)}, jnp.dtype(jnp.bfloat16))
      {'ids': Array([0], dtype=int32), 'w': Array([0], dtype=bfloat16)}
    """
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
    """Makes the state before the first step."""
    return LossScale(scale=jnp.float32(spec.initial), good_steps=jnp.int32(0), skipped=jnp.int32(0))


def update_loss_scale(state: LossScale, finite: jax.Array, *, spec: LossScaleSpec) -> LossScale:
    """Returns the state after a step; `finite`, bool[], is True if its gradients were finite."""
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
