"""Queries, keys and values on a TPU: norm, rope and the order of heads in one pass over memory.

XLA makes several passes of them, in f32, because projections have [B, T, H * hd] while attention
reads [H, B, T, hd] (docs/results/chips.md). The kernels round where the plain form does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.layers import rms_norm
from jaxrl.models.rope import RopeTable, apply_rope

_LANES = 128  # of a TPU's vector unit
_LARGEST = 2**20  # numbers in a block of tokens


class Settings(NamedTuple):
    """Static settings of one call."""

    size: int  # of a head
    eps: float
    precision: Precision
    factor: float = 1.0  # of the result, which is rounded before and after
    interpret: bool = False


def arrange(
    y: jax.Array, table: RopeTable | None, weight: jax.Array | None, settings: Settings
) -> jax.Array:
    """Divides projections [B, T, H * hd] by heads, applies the norm and the rope of queries and
    keys, then `factor`, and returns [B, T, H, hd], all in `activations`. It lies in memory as
    [H, B, T, hd].

    Args:
      y: in `activations`.
      table: the rope's; None for values, which have none.
      weight: f32[hd], the norm's; None without one.
      settings: of the call.
    """
    whole = table is None or 2 * table.cos.shape[-1] == settings.size
    if not (whole and _fits(y, settings)):
        return plain(y, table, weight, settings)
    rotation = None
    if table is not None:
        cos, sin = table.cos[:, :, 0], table.sin[:, :, 0]
        rotation = tuple(jnp.concatenate(x, axis=-1) for x in ((cos, cos), (-sin, sin)))
    row = None if weight is None else weight.reshape(1, settings.size)
    return _arrange(y, rotation, row, settings).transpose(1, 2, 0, 3)


def join(x: jax.Array, settings: Settings) -> jax.Array:
    """Returns attention's output [B, T, H, hd] as a product reads it, [B, T, H * hd]. It is fastest
    if the output lies in memory as that of `arrange`."""
    if not _fits(x, settings):
        return x.reshape(*x.shape[:2], -1)
    return _join(x.transpose(2, 0, 1, 3), settings)


def _fits(x: jax.Array, settings: Settings) -> bool:
    whole = settings.size % _LANES == 0 and x.shape[1] % _LANES == 0
    return whole and x.dtype == jnp.bfloat16


def plain(
    y: jax.Array, table: RopeTable | None, weight: jax.Array | None, settings: Settings
) -> jax.Array:
    """Computes `arrange` by XLA, which keeps the order of projections."""
    precision = settings.precision
    y = y.reshape(*y.shape[:2], -1, settings.size)
    if weight is not None:
        y = rms_norm(y, weight, eps=settings.eps, precision=precision)
    if table is not None:
        y = apply_rope(y, table, precision=precision)
    if settings.factor != 1:
        wide = y.astype(precision.accumulate) * settings.factor
        y = wide.astype(precision.activations)
    return y


def _forward_kernel(*refs, names, heads, settings):
    of = dict(zip(names, refs, strict=True))
    for h in range(heads):
        x = of["y"][0, :, _columns(h, settings)]
        if "weight" in of:
            wide = x.astype(jnp.float32)
            x = (wide * _inverse(wide, settings) * of["weight"][...]).astype(x.dtype)
        if "cos" in of:
            wide = x.astype(jnp.float32)
            x = (wide * of["cos"][0] + _turned(wide) * of["sin"][0]).astype(x.dtype)
        x = _scaled(x, settings)
        of["out"][h, 0] = x


def _backward_kernel(*refs, names, heads, settings):
    of = dict(zip(names, refs, strict=True))
    total = jnp.zeros(of["dout"].shape[2:], jnp.float32)
    for h in range(heads):
        g = _scaled(of["dout"][h, 0], settings)
        if "cos" in of:
            wide = g.astype(jnp.float32)
            g = (wide * of["cos"][0] + _turned(wide * of["sin"][0])).astype(g.dtype)
        if "weight" in of:
            x = of["y"][0, :, _columns(h, settings)].astype(jnp.float32)
            wide, inverse = g.astype(jnp.float32), _inverse(x, settings)
            total += wide * (x * inverse)
            wide = wide * of["weight"][...]
            slope = jnp.sum(wide * x, axis=-1, keepdims=True) * inverse * inverse / x.shape[-1]
            g = (inverse * (wide - x * slope)).astype(g.dtype)
        of["dy"][0, :, _columns(h, settings)] = g
    if "dweight" in of:
        of["dweight"][0, 0] = jnp.sum(total.reshape(-1, 8, total.shape[-1]), axis=0)


def _columns(head: int, settings: Settings) -> slice:
    return slice(head * settings.size, (head + 1) * settings.size)


def _scaled(x: jax.Array, settings: Settings) -> jax.Array:
    if settings.factor == 1:
        return x
    return (x.astype(jnp.float32) * settings.factor).astype(x.dtype)


def _inverse(x: jax.Array, settings: Settings) -> jax.Array:
    return lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + settings.eps)


def _turned(x: jax.Array) -> jax.Array:
    """Exchanges the halves of a head."""
    from jax.experimental.pallas import tpu

    return tpu.roll(x, x.shape[-1] // 2, 1)


def _call(kernel: Any, given: dict[str, Any], made: dict[str, Any], settings: Settings) -> Any:
    """Runs a kernel for each block of tokens of each row. Arrays lie by tokens, [B, T, ...], by
    heads, [H, B, T, hd], by blocks, [B, T / block, 8, hd], or are rows [1, hd]."""
    from jax.experimental import pallas  # slow to import

    batch, length, width = given["y"].shape if "y" in given else made["dy"].shape
    most = max(_LANES, _LARGEST // width)
    block = next(n for n in (512, 256, _LANES) if length % n == 0 and n <= most)

    def spec(name: str, x: Any) -> Any:
        if name == "weight":
            return pallas.BlockSpec(x.shape, lambda b, t: (0, 0))
        if name == "dweight":
            return pallas.BlockSpec((1, 1, *x.shape[2:]), lambda b, t: (b, t, 0, 0))
        if x.ndim == 4:
            shape = (x.shape[0], 1, block, x.shape[3])
            return pallas.BlockSpec(shape, lambda b, t: (0, b, t, 0))
        return pallas.BlockSpec((1, block, x.shape[2]), lambda b, t: (b, t, 0))

    if "dweight" in made:
        made["dweight"] = jax.ShapeDtypeStruct(
            (batch, length // block, 8, settings.size), jnp.float32
        )
    names = (*given, *made)
    return pallas.pallas_call(
        functools.partial(kernel, names=names, heads=width // settings.size, settings=settings),
        grid=(batch, length // block),
        in_specs=[spec(name, x) for name, x in given.items()],
        out_specs=[spec(name, x) for name, x in made.items()],
        out_shape=list(made.values()),
        interpret=settings.interpret,
    )(*given.values())


def _arrange_forward(y, rotation, weight, settings):
    more = _named(rotation, weight)
    heads = y.shape[2] // settings.size
    out = jax.ShapeDtypeStruct((heads, *y.shape[:2], settings.size), y.dtype)
    (out,) = _call(_forward_kernel, {"y": y, **more}, {"out": out}, settings)
    # Without a norm the backward pass needs no `y`.
    return out, (y if weight is not None else None, rotation, weight)


def _arrange_backward(settings, residuals, dout):
    y, rotation, weight = residuals
    heads, batch, length, size = dout.shape
    made = {"dy": jax.ShapeDtypeStruct((batch, length, heads * size), dout.dtype)}
    given = {"dout": dout, **_named(rotation, weight)}
    if weight is None:
        (dy,) = _call(_backward_kernel, given, made, settings)
        return dy, None, None
    dy, dweight = _call(_backward_kernel, {"y": y, **given}, {**made, "dweight": None}, settings)
    return dy, None, jnp.sum(dweight, axis=(0, 1, 2)).reshape(weight.shape)


def _named(rotation: Any, weight: jax.Array | None) -> dict[str, jax.Array]:
    more = {} if rotation is None else dict(zip(("cos", "sin"), rotation, strict=True))
    return more if weight is None else {**more, "weight": weight}


_arrange: Any = jax.custom_vjp(lambda *args: _arrange_forward(*args)[0], nondiff_argnums=(3,))
_arrange.defvjp(_arrange_forward, _arrange_backward)


def _join_forward(x, settings):
    return _arrange_backward(settings, (None, None, None), x)[0], None


def _join_backward(settings, _, dout):
    return (_arrange_forward(dout, None, None, settings)[0],)


_join: Any = jax.custom_vjp(lambda *args: _join_forward(*args)[0], nondiff_argnums=(1,))
_join.defvjp(_join_forward, _join_backward)
