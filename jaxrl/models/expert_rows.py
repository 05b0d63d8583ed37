"""Rows of tokens in the order of their experts, and the products of these rows.

A token has a row for each of its k experts. Rows are put in order and back by gathers alone, in
both directions: the gradient of JAX's own rule would add rows one after the other, as it does not
know that each occurs once.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core.half_bits import with_its_bits
from jaxrl.core.precision import Precision
from jaxrl.models.products import OUTPUT, grouped_product, named


class Order(NamedTuple):
    """The rows of N tokens, sorted by expert. Entry n * k + i is token n's expert i."""

    entries: jax.Array  # i32[N * k], the entry of each row
    places: jax.Array  # i32[k, N], the row of each entry
    sizes: jax.Array  # i32[e], rows of each expert; rows behind them are of other devices' experts
    inside: jax.Array | None  # bool[k, N], entries of these experts; None if these are all


def sort(experts: jax.Array, *, count: int, whole: bool) -> Order:
    """Sorts the rows of tokens by expert.

    Args:
      experts: i32[N, k], the experts of each token; `count` is one of another device.
      count: the number of experts here.
      whole: True if there are no others.
    """
    flat = experts.reshape(-1)
    entries = jnp.argsort(flat, stable=True)
    # The row of each token's first expert, then of its second: sums over them are of whole arrays.
    places = jnp.argsort(entries).reshape(experts.shape).T
    sizes = jnp.bincount(flat, length=count + 1)[:-1].astype(jnp.int32)
    return Order(entries, places, sizes, None if whole else (experts < count).T)


def _project_forward(x, matrices, order, precision):
    rows = _of_experts(x, order, precision)
    product = functools.partial(
        grouped_product, contract=(1, 2), precision=precision, result=precision.activations
    )
    y = tuple(named(product(rows, matrix, order.sizes), OUTPUT) for matrix in matrices)
    return y, (x, matrices, order)


def _project_backward(precision, residuals, dy):
    x, matrices, order = residuals
    rows = _of_experts(x, order, precision)
    product = functools.partial(grouped_product, sizes=order.sizes, precision=precision)
    gradients = [
        _of_tokens(product(d, matrix, contract=(1, 1), result=precision.activations), order)
        for d, matrix in zip(dy, matrices, strict=True)
    ]
    # A token's gradient sums over its experts, so it needs more than 8 or 11 bits of mantissa.
    dx = added((d.astype(precision.accumulate) for each in gradients for d in each), precision)
    dmatrices = tuple(
        product(d, rows, contract=(0, 0), group=(), result=matrix.dtype)
        for d, matrix in zip(dy, matrices, strict=True)
    )
    return dx.astype(x.dtype), dmatrices, None


_project: Any = jax.custom_vjp(lambda *args: _project_forward(*args)[0], nondiff_argnums=(3,))
_project.defvjp(_project_forward, _project_backward)


def project(
    x: jax.Array, matrices: tuple[jax.Array, ...], order: Order, precision: Precision
) -> tuple[jax.Array, ...]:
    """Multiplies the rows of tokens x [N, in] by matrices of their experts, [e, out, in] each.

    Returns:
      Sorted rows [N * k, out] for each of the matrices, in `activations`; undefined for those of
      other devices' experts.
    """
    x = x.astype(precision.activations)
    return _project(x, tuple(m.astype(precision.compute) for m in matrices), order, precision)


def _combine_forward(x, weights, matrix, order, precision):
    y = grouped_product(
        x, matrix, order.sizes, contract=(1, 2), precision=precision, result=precision.activations
    )
    each = zip(_of_tokens(y, order), weights.T, strict=True)
    parts = (y.astype(precision.accumulate) * weight[:, None] for y, weight in each)
    return added(parts, precision), (x, weights, matrix, order)


def _combine_backward(precision, residuals, dy):
    x, weights, matrix, order = residuals
    product = functools.partial(grouped_product, sizes=order.sizes, precision=precision)
    rows = _of_experts(dy, order, precision)
    # Of a row with the weight 1. Its product with `x` is the weight's gradient, so that the
    # result of the forward pass is not needed again.
    unweighted = product(rows, matrix, contract=(1, 1), result=precision.activations)
    unweighted, wide = (v.astype(precision.accumulate) for v in (unweighted, x))
    dweights = _of_entries(jnp.sum(unweighted * wide, axis=-1), order).T
    own = weights.reshape(-1)[order.entries][:, None]
    dmatrix = product(rows, own * wide, contract=(0, 0), group=(), result=matrix.dtype)
    return (own * unweighted).astype(x.dtype), dweights, dmatrix, None


_combine: Any = jax.custom_vjp(lambda *args: _combine_forward(*args)[0], nondiff_argnums=(4,))
_combine.defvjp(_combine_forward, _combine_backward)


def combine(
    x: jax.Array, weights: jax.Array, matrix: jax.Array, order: Order, precision: Precision
) -> jax.Array:
    """Multiplies sorted rows x [N * k, in] by their experts' matrix [e, out, in].

    Returns:
      The sum of each token's rows, times their `weights` [N, k]: [N, out], in `accumulate`.
    """
    x, matrix = x.astype(precision.activations), matrix.astype(precision.compute)
    return _combine(x, weights.astype(precision.accumulate), matrix, order, precision)


def added(parts: Iterable[jax.Array], precision: Precision) -> jax.Array:
    """Adds arrays in order; the order of XLA's sum varies with shapes. With fixed sums each is
    rounded before it is added."""
    if precision.sums == "fixed":
        parts = map(with_its_bits, parts)
    return functools.reduce(jnp.add, parts)


def _of_experts(x: jax.Array, order: Order, precision: Precision) -> jax.Array:
    """Returns the sorted rows [N * k, D] of tokens [N, D], in `activations`."""
    return _taken(x.astype(precision.activations), order.entries // len(order.places))


def _of_tokens(y: jax.Array, order: Order) -> list[jax.Array]:
    """Returns each token's first row, [N, D], its second and so on, from sorted rows; zeros for
    those of other devices' experts."""
    each = [_taken(y, places) for places in order.places]
    if order.inside is None:
        return each
    return [jnp.where(here[:, None], y, 0) for here, y in zip(order.inside, each, strict=True)]


def _of_entries(y: jax.Array, order: Order) -> jax.Array:
    """Returns the number of each entry, [k, N], from a number of each sorted row."""
    each = _taken(y, order.places)
    return each if order.inside is None else jnp.where(order.inside, each, 0)


def _taken(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="promise_in_bounds")
