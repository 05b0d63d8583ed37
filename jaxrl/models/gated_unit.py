"""The gated unit of the feed-forward network, and its gradient in one pass on NVIDIA GPUs.

XLA for GPUs makes three passes of the backward computation: one for each gradient, and one that
repeats the result, which the gradient of the next product's weights needs. A Pallas kernel, which
XLA's own Triton compiles, makes one of them. It rounds where the plain form does.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.gpu_kernels import on_nvidia
from jaxrl.core.precision import Precision

_BLOCK = 2048  # numbers of one program
_NUMBERS = 2**31  # of one array: Triton counts them in 32 bits


class Settings(NamedTuple):
    """Static settings of one call."""

    activation: str  # see `DecoderConfig`
    precision: Precision
    interpret: bool = False


def plain(gate: jax.Array, up: jax.Array, settings: Settings) -> jax.Array:
    """Computes activation(gate) * up in `accumulate`, rounded to `activations`; any shape."""
    precision = settings.precision
    gate, up = gate.astype(precision.accumulate), up.astype(precision.accumulate)
    gelu = settings.activation == "gelu_tanh"
    gate = jax.nn.gelu(gate, approximate=True) if gelu else jax.nn.silu(gate)
    return precision.rounded(gate * up, "products")


class Then(NamedTuple):
    """The product that follows the unit; hashable."""

    run: Callable[[jax.Array, Any], jax.Array]  # linear in its first argument, the unit's result
    local: Callable[..., Callable[..., Any]]  # see `layers.Local`


def _then(gate: jax.Array, up: jax.Array, params: Any, then: Then, settings: Settings) -> jax.Array:
    return then.run(plain(gate, up, settings), params)


def _forward(gate, up, params, then, settings):
    return _then(gate, up, params, then, settings), (gate, up, params)


def _backward(then, settings, residuals, dy):
    gate, up, params = residuals
    # The gradient to the unit does not depend on the unit's result, the one to the parameters does.
    _, backward = jax.vjp(lambda hidden: then.run(hidden, params), jnp.zeros_like(gate))
    axes = ("batch", "length", "mlp")
    on_device = functools.partial(gradients, settings=settings)
    apart = then.local(on_device, inputs=(axes,) * 3, output=axes)
    hidden, d_gate, d_up = apart(gate, up, *backward(dy))
    _, backward = jax.vjp(lambda params: then.run(hidden, params), params)
    return d_gate, d_up, *backward(dy)


multiplied: Any = jax.custom_vjp(_then, nondiff_argnums=(3, 4))
multiplied.defvjp(_forward, _backward)


def gradients(
    gate: jax.Array, up: jax.Array, d: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `plain`, and its gradients to gate and up for the cotangent `d`."""
    kernel = on_nvidia(functools.partial(_by_kernel, settings=settings))
    others = {x.dtype for x in (gate, up, d)} - {jnp.dtype(jnp.bfloat16)}
    if others or gate.size % _BLOCK or gate.size >= _NUMBERS:
        kernel = {}
    default = functools.partial(_by_xla, settings=settings)
    return lax.platform_dependent(gate, up, d, **kernel, default=default)


def _by_xla(gate, up, d, *, settings):
    hidden, backward = jax.vjp(functools.partial(plain, settings=settings), gate, up)
    return hidden, *backward(d)


def _by_kernel(gate, up, d, *, settings):
    from jax.experimental import pallas  # slow to import
    from jax.experimental.pallas import triton

    def kernel(gate, up, d, *results):
        found = _by_xla(gate[...], up[...], d[...], settings=settings)
        for ref, x in zip(results, found, strict=True):
            ref[...] = x

    block = pallas.BlockSpec((_BLOCK,), lambda i: (i,))
    found = pallas.pallas_call(
        kernel,
        grid=(gate.size // _BLOCK,),
        in_specs=[block] * 3,
        out_specs=[block] * 3,
        out_shape=[jax.ShapeDtypeStruct((gate.size,), gate.dtype)] * 3,
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=settings.interpret,
    )(*(x.reshape(-1) for x in (gate, up, d)))
    return tuple(x.reshape(gate.shape) for x in found)
