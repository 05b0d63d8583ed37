"""The kernels for the stream's sums and norms on NVIDIA GPUs, in Pallas' interpreter on CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models.stream_norm import Settings, by_kernel, plain


@pytest.mark.parametrize(
    ("width", "copies", "added"), [(96, 1, True), (128, 1, False), (96, 3, True)]
)
def test_kernels_equal_the_plain_form(width, copies, added):
    """A width may be no power of two."""
    rng = np.random.default_rng(0)
    shape = (2, 16, width)
    settings = Settings(1e-6, parse("bf16_master"), copies, interpret=True)
    weight = jnp.asarray(rng.normal(size=width), jnp.float32)
    given = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(1 + added)]
    cotangents = tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(1 + copies))

    @functools.partial(
        jax.jit, static_argnums=0, compiler_options={"xla_allow_excess_precision": False}
    )
    def both(function, weight, *given):
        out, backward = jax.vjp(functools.partial(function, settings=settings), weight, *given)
        return out, backward(cotangents)

    found, expected = both(by_kernel, weight, *given), both(plain, weight, *given)
    # The plain form rounds each sum of the gradients of several copies.
    differing, tolerance = (0.01, 2**-7) if copies == 1 else (1, 2**-5)
    wide = functools.partial(np.asarray, dtype=np.float64)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if a.dtype == jnp.bfloat16:
            assert np.mean(wide(a) != wide(b)) <= differing
        np.testing.assert_allclose(wide(a), wide(b), rtol=tolerance, atol=tolerance)
