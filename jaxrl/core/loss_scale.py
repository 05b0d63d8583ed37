"""Loss scaling: its declaration, its text form and its state in a run."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct


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
      interval: number of finite steps between two growths, below 2**31.
      floor: the scale never falls below this, nor below a smaller `initial`.

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
        floor, interval = 0 < self.floor <= 2.0**126, 1 <= self.interval < 2**31
        if not (finite and 0 < self.backoff <= 1 and interval and floor):
            raise ValueError(
                f"{self!r}: needs initial > 0, growth >= 1, 0 < backoff <= 1, interval from 1 to "
                "2**31 - 1 and floor > 0, all finite"
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
        elif kind == "dynamic":
            initial, interval, *rest = [*numbers, *("65536", "400")[len(numbers) :]]
            spec = dynamic_loss_scale(float(initial), int(interval))
            if rest:
                growth, backoff, floor = map(float, rest)
                spec = dataclasses.replace(spec, growth=growth, backoff=backoff, floor=floor)
        else:
            raise ValueError
        return spec
    except ValueError:
        raise ValueError(
            f"loss_scale={text!r} is not a loss scale; use 'none', 'static:1024' or "
            "'dynamic:65536:400' (first scale, finite steps between two doublings)"
        ) from None


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
    floor = min(spec.floor, spec.initial)  # a scale that falls never ends higher than it was
    scale = jnp.clip(state.scale * factor, floor, 2.0**126)
    return LossScale(
        scale=jnp.where(factor == 1.0, state.scale, scale),
        good_steps=jnp.where(finite & ~grown, state.good_steps + 1, 0),
        skipped=state.skipped + (~finite).astype(jnp.int32),
    )
