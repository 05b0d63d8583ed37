"""Kernels of the output layer on NVIDIA GPUs, which never write logits to memory.

Products of cuBLAS and of XLA's own Triton end in memory: logits in f32 are four times the largest
array of the step. Here each program computes one block of them and passes on what is needed of it:
its largest logit and its sum for the log-probs, the gradient in `compute` for the backward pass.
Pallas hands the kernels to the Triton that XLA contains.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import Precision

_BLOCK = 128  # rows and columns of a block of logits
TERMS = 64  # terms of a sum that are read at a time
_NUMBERS = 2**31  # of one array: Triton counts them in 32 bits


class Settings(NamedTuple):
    """Static settings of one call."""

    precision: Precision
    interpret: bool = False


class Slopes(NamedTuple):
    """Cotangents of N scores, and what their gradients need; f32[N] each."""

    log_total: jax.Array  # log of the sum of exp(z)
    entropy: jax.Array
    by_logprob: jax.Array
    by_entropy: jax.Array


def supports(h: jax.Array, weights: jax.Array, precision: Precision) -> bool:
    """Tells if the kernels are for hidden states [N, D] and weights [V, D]: operands of 16 bits,
    logits in f32, sums in any order, a vocabulary that has no incomplete block."""
    wide = precision.logits == precision.accumulate == jnp.float32
    narrow = precision.compute.itemsize == 2 and precision.sums == "any"
    small = max(weights.size, h.shape[0] * weights.shape[0]) < _NUMBERS
    return wide and narrow and small and not (len(weights) % _BLOCK or h.shape[1] % TERMS)


def reduced(
    h: jax.Array, weights: jax.Array, target: jax.Array, temperature: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Reduces the logits z = h @ weights.T / temperature.

    Args:
      h: compute[N, D].
      weights: compute[V, D].
      target: i32[N], entries of the vocabulary.
      temperature: f32[].
      settings: of the call.

    Returns:
      f32[N] each: the largest logit, the sums of exp(z - largest) and of exp(z - largest) *
      (z - largest), and the logit of the target.
    """
    sums = jax.ShapeDtypeStruct((len(weights) // _BLOCK, len(h)), jnp.float32)
    made = [sums, sums, sums, jax.ShapeDtypeStruct((len(h),), jnp.float32)]
    given = (h, weights, target, temperature.reshape(1))
    tops, totals, moments, chosen = _call(_reduce_kernel, given, made, settings)
    top = jnp.max(tops, axis=0)
    shift = tops - top[None, :]
    factor = jnp.exp(shift)
    moment = jnp.sum(factor * (moments + shift * totals), axis=0)
    return top, jnp.sum(factor * totals, axis=0), moment, chosen


def gradient(
    h: jax.Array,
    weights: jax.Array,
    target: jax.Array,
    temperature: jax.Array,
    slopes: Slopes,
    settings: Settings,
) -> jax.Array:
    """Computes the gradient of scores to the logits: compute[N, V]. For the other arguments see
    `reduced`."""
    made = jax.ShapeDtypeStruct((len(h), len(weights)), h.dtype)
    given = (h, weights, target, temperature.reshape(1), *slopes)
    (found,) = _call(_gradient_kernel, given, [made], settings)
    return found


# The arguments that are by rows.
BY_ROWS = {reduced: (True, False, True, False), gradient: (True, False, True, False, True)}


def _call(kernel: Any, given: Any, made: Any, settings: Settings) -> Any:
    from jax.experimental import pallas  # slow to import
    from jax.experimental.pallas import triton

    h, weights = given[:2]
    return pallas.pallas_call(
        functools.partial(kernel, precision=settings.precision),
        out_shape=made,
        # Blocks of rows follow each other, so that a block of weights is read from memory once.
        grid=(-(-len(h) // _BLOCK), len(weights) // _BLOCK),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        metadata={"flops": str(2 * h.shape[0] * weights.size)},
        interpret=settings.interpret,
    )(*given)


def _reduce_kernel(h, weights, target, temperature, top, total, moment, chosen, *, precision):
    from jax.experimental.pallas import triton

    rows, there, column = _place(h)
    z, columns = _logits(h, weights, temperature, precision)
    largest = jnp.max(z, axis=1)
    apart = z - largest[:, None]
    weight = jnp.exp(apart)
    found = (largest, jnp.sum(weight, axis=1), jnp.sum(weight * apart, axis=1))
    for ref, x in zip((top, total, moment), found, strict=True):
        triton.store(ref.at[column, rows], x, mask=there)
    own = triton.load(target.at[rows], mask=there, other=-1)
    here = (own >= column * _BLOCK) & (own < (column + 1) * _BLOCK)
    own = own[:, None] == columns[None, :]
    triton.store(chosen.at[rows], jnp.sum(jnp.where(own, z, 0), axis=1), mask=here)


def _gradient_kernel(
    h, weights, target, temperature, log_total, entropy, by_logprob, by_entropy, out, *, precision
):
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    rows, there, column = _place(h)
    z, columns = _logits(h, weights, temperature, precision)

    def load(ref: Any) -> jax.Array:
        return triton.load(ref.at[rows], mask=there, other=0)[:, None]

    logp, slope = z - load(log_total), load(by_logprob)
    per_p = slope + load(by_entropy) * (logp + load(entropy))
    found = jnp.where(load(target) == columns[None, :], slope, 0) - jnp.exp(logp) * per_p
    at = out.at[rows, pallas.ds(column * _BLOCK, _BLOCK)]
    triton.store(at, found.astype(out.dtype), mask=there[:, None])


def _place(h: Any) -> tuple[Any, jax.Array, Any]:
    """Returns the rows of this program's block, which of them are there, and its column."""
    from jax.experimental import pallas

    row, column = pallas.program_id(0), pallas.program_id(1)
    first = row * _BLOCK
    return pallas.ds(first, _BLOCK), first + jnp.arange(_BLOCK) < h.shape[0], column


def _logits(h, weights, temperature, precision):
    """Computes this program's block of logits, and the places of its columns."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    rows, there, column = _place(h)
    own = pallas.ds(column * _BLOCK, _BLOCK)

    def step(i, z):
        terms = pallas.ds(i * TERMS, TERMS)
        left = triton.load(h.at[rows, terms], mask=there[:, None], other=0)
        right = triton.load(weights.at[own, terms])
        return z + triton.dot(left, right, trans_b=True, precision=precision.algorithm)

    z = jnp.zeros((_BLOCK, _BLOCK), jnp.float32)
    z = lax.fori_loop(0, h.shape[1] // TERMS, step, z)
    return z * (1 / temperature[0]), column * _BLOCK + jnp.arange(_BLOCK)
