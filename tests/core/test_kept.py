"""Records of the tokens that truncated sampling kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.kept import RECORD, among, decode, encode, most_kept


@pytest.mark.parametrize("vocab_size", [2, 3, 30, 256, 257, 65_537, 262_208])
def test_records_are_read_as_they_were_written(vocab_size):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, (3, 5, most_kept(vocab_size))).astype(np.int32)
    ids[0, 0] = vocab_size - 1
    records = encode(ids, vocab_size)
    assert (records.dtype, records.shape) == (np.uint8, (3, 5, RECORD))
    np.testing.assert_array_equal(decode(jnp.asarray(records), vocab_size), ids)
    compiled = jax.jit(encode, static_argnums=1)(jnp.asarray(ids), vocab_size)
    np.testing.assert_array_equal(compiled, records)
    if vocab_size < 1000:
        expected = [[np.isin(np.arange(vocab_size), one) for one in row] for row in ids]
        found = among(jnp.asarray(ids), jnp.arange(vocab_size))
        np.testing.assert_array_equal(found, expected)
