"""A compiled function keeps its roundings, alone or in a program of one's own, and says so where it
could not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.compiled import SUMS, jit, jit_by_precision, jit_forward
from jaxrl.core.precision import parse


def rounded(x: jax.Array) -> jax.Array:
    return 3 * x.astype(jnp.bfloat16).astype(jnp.float32)


X = jnp.arange(1, 9, dtype=jnp.float32) / 7
EXPECTED = 3 * np.asarray(X.astype(jnp.bfloat16)).astype(np.float32)

OUTER = {
    "jit": lambda inner: jax.jit(inner)(X),
    "jit without arguments": lambda inner: jax.jit(lambda: inner(X))(),
    "jaxrl.jit": lambda inner: jit(lambda x: inner(x))(X),
    "lower": lambda inner: jit(lambda x: inner(x)).lower(X),
    "scan": lambda inner: jax.lax.scan(lambda x, _: (inner(x), None), X, length=2),
    "grad": lambda inner: jax.grad(lambda x: inner(x).sum())(X),
}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("compile_it", [jit, jit_forward])
def test_nested_program_is_refused(outer, compile_it):
    with pytest.raises(ValueError, match=r"rounded is compiled by jaxrl\.jit.* once, outermost"):
        outer(compile_it(rounded))


def test_a_program_by_precision_is_refused_alike():
    @jit_by_precision(static_argnames=("precision",))
    def product(x, *, precision):
        return x.astype(precision.compute)

    for sums in SUMS:
        precision = parse(f"bf16_master,sums={sums}")
        np.testing.assert_array_equal(product(X, precision=precision), X.astype(jnp.bfloat16))
        with pytest.raises(ValueError, match="product is compiled by"):
            jax.jit(functools.partial(product, precision=precision))(X)


def test_plain_function_keeps_roundings_in_outer_program():
    def twice(x):
        return jax.lax.scan(lambda x, _: (rounded(x), None), x, length=1)[0]

    for function in (rounded, twice, jax.vmap(rounded)):
        np.testing.assert_array_equal(jit(function)(X), EXPECTED)


def test_function_errors_pass_through():
    def refuse(_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine"):
        jit(refuse)(X)


def test_compiled_function_has_jax_methods():
    compiled = jit(rounded)
    assert compiled.eval_shape(X).shape == X.shape
    np.testing.assert_array_equal(compiled.lower(X).compile()(X), EXPECTED)
    np.testing.assert_array_equal(compiled.trace(X).lower().compile()(X), EXPECTED)
    np.testing.assert_array_equal(jax.vmap(compiled)(X), EXPECTED)  # outermost still
