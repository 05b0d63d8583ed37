"""Casts of a checkpoint's tensors while they are read."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import huggingface
from jaxrl.huggingface.files import SINGLE
from tests import tiny

FIRST, SECOND = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2))


@pytest.fixture
def directory(tmp_path):
    huggingface.save(tmp_path, tiny.params(), tiny.CONFIG, dtype=jnp.dtype("float32"))
    return tmp_path


def change(directory, name, *, dtype, factor=1.0):
    """Stores a tensor of a checkpoint in another dtype, multiplied by a factor."""
    tensors = load_file(directory / SINGLE)
    changed = (tensors[name].astype(dtype) * np.asarray(factor, dtype)).astype(dtype)
    save_file(tensors | {name: changed}, directory / SINGLE, metadata={"format": "pt"})
    return changed


@pytest.mark.parametrize(
    ("stored", "factor", "dtype"),
    [("float64", 1e300, "float32"), ("float32", 1e9, "float16"), ("bfloat16", 1e9, "float16")],
)
def test_unrepresentable_values_are_named(stored, factor, dtype, directory):
    change(directory, SECOND, dtype=jnp.dtype(stored), factor=factor)
    with pytest.raises(ValueError, match=f"{SECOND}' has values that are infinite in {dtype}"):
        huggingface.load(directory, dtype=jnp.dtype(dtype))


def test_an_export_makes_nothing_infinite(tmp_path):
    params = tiny.params()
    params["layers"]["q"] = params["layers"]["q"].at[1, 0].set(7e4)
    huggingface.save(tmp_path, params, tiny.CONFIG, dtype=jnp.dtype("bfloat16"))
    with pytest.raises(ValueError, match="'layers/q' has values that are infinite in float16"):
        huggingface.save(tmp_path, params, tiny.CONFIG, dtype=jnp.dtype("float16"))


def test_layers_of_two_dtypes_keep_the_wider_one(directory):
    narrow = change(directory, FIRST, dtype=jnp.bfloat16)
    wide = load_file(directory / SINGLE)[SECOND]
    _, params = huggingface.load(directory, dtype=None)
    for layer, expected in enumerate((narrow, wide)):
        np.testing.assert_array_equal(params["layers"]["q"][layer], expected.astype(np.float32))
