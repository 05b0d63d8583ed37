"""Arrays as integers of the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.half_bits import with_its_bits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_numbers_and_gradients_pass_unchanged(dtype) -> None:
    with jax.enable_x64(dtype == jnp.float64):
        x = jnp.asarray([0.0, -0.0, 1e-7, -3.1, np.inf, -np.inf, np.nan], dtype)
        found, pull = jax.vjp(with_its_bits, x)
        for same in (found, *pull(x)):
            assert same.dtype == dtype
            ours, given = (np.asarray(one, np.float64) for one in (same, x))
            np.testing.assert_array_equal(ours, given)
            np.testing.assert_array_equal(np.signbit(ours), np.signbit(given))
