"""Each row is multiplied by its own adapter, whatever the order of rows and their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.adapter_rows import AdapterRows

ADAPTERS = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((12, 2, 3)).astype(np.float32)
# One adapter has half of the rows, one none, and some rows have none.
WHICH = np.array([3, 0, 0, -1, 0, 3, 0, 1, 0, -1, 0, 3], np.int32)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_each_row_has_its_own(parts):
    own = np.where(WHICH[:, None, None] < 0, 0, ADAPTERS[WHICH])
    expected = np.einsum("bti,boi->bto", X, own)
    rows = AdapterRows(jnp.asarray(WHICH), count=4, most=8, parts=parts)

    @jax.jit
    def found(rows):
        return rows.sorted().apply(lambda x, a: jnp.einsum("bti,oi->bto", x, a), X, ADAPTERS)

    np.testing.assert_allclose(found(rows), expected, rtol=1e-5)


def test_rows_that_pad_the_batch_displace_no_other():
    rows = AdapterRows(jnp.zeros(6, jnp.int32), count=1, most=4, parts=1)
    found = rows.sorted().apply(lambda x, a: x * a, jnp.arange(1.0, 7.0), jnp.ones(1))
    np.testing.assert_array_equal(found, [1, 2, 3, 4, 0, 0])
