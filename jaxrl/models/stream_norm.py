"""Sums and norms of the residual stream, in one pass for each direction on NVIDIA GPUs.

XLA for GPUs reads the stream once for a norm's mean and once more to divide by it, and adds up the
gradients of the products that follow in a pass of their own. Pallas kernels, which XLA's own Triton
compiles, make one pass. They round where the plain form does, except that gradients of products are
added in f32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.gpu_kernels import on_nvidia
from jaxrl.core.precision import Precision
from jaxrl.models.layers import Layer, LayerContext, rms_norm

_AT_ONCE = 4096  # numbers
_ROWS = 16  # of one program of the backward kernel
_NUMBERS = 2**31  # of one array: Triton counts them in 32 bits

_STREAM = ("batch", "length", "embed")


class Settings(NamedTuple):
    """Static settings of one call."""

    eps: float
    precision: Precision
    copies: int
    interpret: bool = False


Copies = tuple[jax.Array, ...]


def add_and_norm(
    x: jax.Array,
    more: jax.Array | None,
    layer: Layer,
    name: str,
    *,
    copies: int,
    context: LayerContext,
) -> tuple[jax.Array, Copies]:
    """Adds to the residual stream and applies a norm of the layer, if its family has one there.

    Args:
      x: [B, T, D], the stream.
      more: [B, T, D]; None adds nothing.
      layer: parameters of the layer.
      name: of the norm.
      copies: number of products that follow. Each gets an array of its own, so that their gradients
        are added in the norm's pass.
      context: settings of all layers.

    Returns:
      The new stream, and `copies` times its norm.
    """
    precision, given = context.precision, [x] if more is None else [x, more]
    if context.on_gpu and name in layer:
        settings = Settings(context.config.rms_norm_eps, precision, copies)
        run = context.local(
            functools.partial(_on_device, settings=settings),
            inputs=(("embed",), *(_STREAM for _ in given)),
            output=_STREAM,
        )
        stream, *normed = run(context.norm_weight(layer[name]), *given)
        return context.constrain(stream, _STREAM), tuple(normed)
    if more is not None:
        x = context.constrain(precision.rounded(x + more, "stream"), _STREAM)
    return x, (context.layer_norm(x, layer, name),) * copies


def _on_device(weight, *given, settings):
    x = given[0]
    kernel = on_nvidia(functools.partial(by_kernel, settings=settings))
    large = x.size >= _NUMBERS or x.shape[-1] > _AT_ONCE * 2
    if large or x.dtype != jnp.bfloat16 or x.size // x.shape[-1] % _ROWS:
        kernel = {}
    default = functools.partial(plain, settings=settings)
    return lax.platform_dependent(weight, *given, **kernel, default=default)


def plain(weight: jax.Array, x: jax.Array, *more: jax.Array, settings: Settings) -> Copies:
    """Returns the sum of the stream and what is added, and copies of its norm, by XLA."""
    precision = settings.precision
    for one in more:
        x = precision.rounded(x + one, "stream")
    return (x, *(rms_norm(x, weight, eps=settings.eps, precision=precision),) * settings.copies)


def by_kernel(weight: jax.Array, x: jax.Array, *more: jax.Array, settings: Settings) -> Copies:
    """Returns what `plain` does, by the kernels; `weight` is f32[D]."""
    rows = [one.reshape(-1, x.shape[-1]) for one in (x, *more)]
    return tuple(one.reshape(x.shape) for one in _normed(weight, rows, settings))


def _forward(weight, given, settings):
    x = given[0]
    made = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * len(given)
    *total, normed = _call(_forward_kernel, (weight, *given), made, settings)
    (stream,) = total or (x,)
    return (stream, *(normed,) * settings.copies), (weight, stream, len(given))


def _backward(settings, residuals, cotangents):
    weight, x, count = residuals
    blocks = len(x) // _ROWS
    made = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((blocks, x.shape[1]), jnp.float32),
    ]
    dx, dweight = _call(_backward_kernel, (weight, x, *cotangents), made, settings)
    return jnp.sum(dweight, axis=0), [dx] * count


_normed: Any = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(2,))
_normed.defvjp(_forward, _backward)


def _call(kernel: Any, given: Any, made: Any, settings: Settings) -> Any:
    from jax.experimental import pallas  # slow to import
    from jax.experimental.pallas import triton

    rows, width = given[1].shape
    at_once = max(1, min(_ROWS, _AT_ONCE // _power(width)))
    own = at_once if kernel is _forward_kernel else _ROWS
    return pallas.pallas_call(
        functools.partial(kernel, given=len(given), at_once=at_once, settings=settings),
        grid=(rows // own,),
        out_shape=made,
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=settings.interpret,
    )(*given)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _forward_kernel(*refs, given, at_once, settings):
    from jax.experimental import pallas

    (weight, x, *more), made = refs[:given], refs[given:]
    rows = pallas.ds(pallas.program_id(0) * at_once, at_once)
    wide = _load(x, rows)
    for one in more:
        wide = (wide + _load(one, rows)).astype(x.dtype).astype(jnp.float32)
        _store(made[0], rows, wide)
    _store(made[-1], rows, wide * _inverse(wide, x, settings) * _load(weight)[None, :])


def _backward_kernel(*refs, given, at_once, settings):
    from jax.experimental import pallas

    (weight, x, into_stream, *into_copies), (dx, dweight) = refs[:given], refs[given:]
    scale, size, block = _load(weight)[None, :], x.shape[1], pallas.program_id(0)

    def step(i, total):
        rows = pallas.ds(block * _ROWS + i * at_once, at_once)
        wide, slope = _load(x, rows), sum(_load(one, rows) for one in into_copies)
        inverse = _inverse(wide, x, settings)
        total = total + slope * (wide * inverse)
        slope = slope * scale
        along = jnp.sum(slope * wide, axis=1, keepdims=True) * inverse * inverse / size
        found = (inverse * (slope - wide * along)).astype(x.dtype).astype(jnp.float32)
        _store(dx, rows, found + _load(into_stream, rows))
        return total

    total = jnp.zeros((at_once, scale.shape[1]), jnp.float32)
    total = lax.fori_loop(0, _ROWS // at_once, step, total)
    _store(dweight, block, jnp.sum(total, axis=0))


def _inverse(wide: jax.Array, x: Any, settings: Settings) -> jax.Array:
    mean = jnp.sum(wide * wide, axis=1, keepdims=True) / x.shape[1]
    return lax.rsqrt(mean + settings.eps)


def _columns(ref: Any, *rows: Any) -> tuple[Any, Any]:
    """Returns a reference to whole rows, filled up to a power of two, and the mask of what is
    there."""
    from jax.experimental import pallas

    size = _power(ref.shape[-1])
    there = jnp.arange(size) < ref.shape[-1]
    if rows and isinstance(rows[0], pallas.Slice):
        there = jnp.broadcast_to(there[None, :], (rows[0].size, size))
    return ref.at[(*rows, pallas.ds(0, size))], None if size == ref.shape[-1] else there


def _load(ref: Any, *rows: Any) -> jax.Array:
    from jax.experimental.pallas import triton

    at, mask = _columns(ref, *rows)
    return triton.load(at, mask=mask, other=None if mask is None else 0).astype(jnp.float32)


def _store(ref: Any, rows: Any, x: jax.Array) -> None:
    from jax.experimental.pallas import triton

    at, mask = _columns(ref, rows)
    triton.store(at, x.astype(ref.dtype), mask=mask)
