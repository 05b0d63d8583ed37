"""Queries and keys on an NVIDIA GPU: norm and rope in one pass over memory.

XLA makes several passes of them. A Pallas kernel for each direction, which XLA's own Triton
compiles, makes one, and rounds where the plain form does. Heads stay in the order of projections,
[B, T, H, hd], which is that of attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.gpu_kernels import on_nvidia
from jaxrl.models.heads import Settings, plain
from jaxrl.models.rope import RopeTable

_TOKENS = 32  # of one program, which has one head of them
_NUMBERS = 2**31  # of one array: Triton counts them in 32 bits


def turn(y: jax.Array, table: RopeTable, weight: jax.Array | None, settings: Settings) -> jax.Array:
    """Divides projections [B, T, H * hd] by heads and applies the norm and the rope of queries and
    keys: [B, T, H, hd] in `activations`.

    Args:
      y: in `activations`.
      table: the rope's.
      weight: f32[hd], the norm's; None without one.
      settings: of the call.
    """
    size, tokens = settings.size, y.shape[0] * y.shape[1]
    whole = 2 * table.cos.shape[-1] == size and size & (size - 1) == 0 and size >= 32
    if tokens % _TOKENS or not whole or y.dtype != jnp.bfloat16 or y.size >= _NUMBERS:
        return plain(y, table, weight, settings)
    return lax.platform_dependent(
        y,
        table,
        weight,
        **on_nvidia(functools.partial(by_kernel, settings=settings)),
        default=functools.partial(plain, settings=settings),
    )


def by_kernel(
    y: jax.Array, table: RopeTable, weight: jax.Array | None, settings: Settings
) -> jax.Array:
    """Computes `turn` by the kernels."""
    rows = y.reshape(-1, y.shape[-1])
    cos, sin = (x.reshape(len(rows), -1) for x in (table.cos, table.sin))
    return _turn(rows, cos, sin, weight, settings).reshape(*y.shape[:2], -1, settings.size)


def _forward_kernel(*refs, names, settings):
    of = dict(zip(names, refs, strict=True))
    cos, sin = _load(of["cos"]), _load(of["sin"])
    halves = tuple(_load(of["y"], half, settings) for half in range(2))
    if "weight" in of:
        inverse = _inverse(halves, settings)
        scales = (_scale(of["weight"], half) for half in range(2))
        halves = tuple(
            _rounded(x * inverse * w, of["y"]) for x, w in zip(halves, scales, strict=True)
        )
    first, second = halves
    _store(of["out"], first * cos - second * sin, 0, settings)
    _store(of["out"], second * cos + first * sin, 1, settings)


def _backward_kernel(*refs, names, settings):
    from jax.experimental import pallas

    of = dict(zip(names, refs, strict=True))
    cos, sin = _load(of["cos"]), _load(of["sin"])
    first, second = (_load(of["dout"], half, settings) for half in range(2))
    halves = (first * cos + second * sin, second * cos - first * sin)
    if "weight" in of:
        slopes = tuple(_rounded(g, of["dout"]) for g in halves)
        values = tuple(_load(of["y"], half, settings) for half in range(2))
        inverse = _inverse(values, settings)
        for half in range(2):
            total = jnp.sum(slopes[half] * (values[half] * inverse), axis=0)
            here = pallas.ds(half * (settings.size // 2), settings.size // 2)
            of["dweight"][pallas.program_id(0), pallas.program_id(1), here] = total
        slopes = tuple(g * _scale(of["weight"], half) for half, g in enumerate(slopes))
        dot = sum(
            jnp.sum(g * x, axis=1, keepdims=True) for g, x in zip(slopes, values, strict=True)
        )
        slope = dot * inverse * inverse / settings.size
        halves = tuple(inverse * (g - x * slope) for g, x in zip(slopes, values, strict=True))
    for half in range(2):
        _store(of["dy"], halves[half], half, settings)


def _place(half: int | None, settings: Settings | None) -> tuple[Any, Any]:
    """Returns this program's tokens, and its head's first or second half; all columns for None."""
    from jax.experimental import pallas

    tokens = pallas.ds(pallas.program_id(0) * _TOKENS, _TOKENS)
    if half is None or settings is None:
        return tokens, slice(None)
    first = pallas.program_id(1) * settings.size + half * (settings.size // 2)
    return tokens, pallas.ds(first, settings.size // 2)


def _load(ref: Any, half: int | None = None, settings: Settings | None = None) -> jax.Array:
    return ref[_place(half, settings)].astype(jnp.float32)


def _store(ref: Any, x: jax.Array, half: int, settings: Settings) -> None:
    ref[_place(half, settings)] = x.astype(ref.dtype)


def _scale(weight: Any, half: int) -> jax.Array:
    from jax.experimental import pallas

    size = weight.shape[0] // 2
    return weight[pallas.ds(half * size, size)][None, :]


def _rounded(x: jax.Array, like: Any) -> jax.Array:
    return x.astype(like.dtype).astype(jnp.float32)


def _inverse(halves: tuple[jax.Array, ...], settings: Settings) -> jax.Array:
    squares = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in halves)
    return lax.rsqrt(squares / settings.size + settings.eps)


def _call(kernel: Any, given: dict[str, Any], made: dict[str, Any], settings: Settings) -> Any:
    from jax.experimental import pallas  # slow to import
    from jax.experimental.pallas import triton

    tokens, width = (given["y"] if "y" in given else given["dout"]).shape
    heads = width // settings.size
    if "dweight" in made:
        shape = (tokens // _TOKENS, heads, settings.size)
        made["dweight"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pallas.pallas_call(
        functools.partial(kernel, names=(*given, *made), settings=settings),
        grid=(tokens // _TOKENS, heads),
        out_shape=list(made.values()),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=settings.interpret,
    )(*given.values())


def _turn_forward(y, cos, sin, weight, settings):
    given = {"y": y, **_named(cos, sin, weight)}
    (out,) = _call(
        _forward_kernel, given, {"out": jax.ShapeDtypeStruct(y.shape, y.dtype)}, settings
    )
    # Without a norm the backward pass needs no `y`.
    return out, (None if weight is None else y, cos, sin, weight)


def _turn_backward(settings, residuals, dout):
    y, cos, sin, weight = residuals
    given = {"dout": dout, **_named(cos, sin, weight)}
    made = {"dy": jax.ShapeDtypeStruct(dout.shape, dout.dtype)}
    if weight is None:
        (dy,) = _call(_backward_kernel, given, made, settings)
        return dy, None, None, None
    dy, dweight = _call(_backward_kernel, {"y": y, **given}, {**made, "dweight": None}, settings)
    return dy, None, None, jnp.sum(dweight, axis=(0, 1))


def _named(cos: jax.Array, sin: jax.Array, weight: jax.Array | None) -> dict[str, jax.Array]:
    more = {} if weight is None else {"weight": weight}
    return {"cos": cos, "sin": sin, **more}


_turn: Any = jax.custom_vjp(lambda *args: _turn_forward(*args)[0], nondiff_argnums=(4,))
_turn.defvjp(_turn_forward, _turn_backward)
