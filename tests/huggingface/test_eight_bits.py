"""Checkpoints in 8 bits hold the numbers that a policy with `blocks` computes with."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from jaxrl import huggingface
from jaxrl.core.blocks import MATRICES, round_matrix
from jaxrl.huggingface import eight_bits
from jaxrl.models import spec
from jaxrl.models.integers import quantise
from jaxrl.models.parameters import param_specs
from tests import tiny

BF16 = np.dtype(jnp.bfloat16)
WIDE = dataclasses.replace(tiny.MOE, hidden_size=161, intermediate_size=257)  # blocks not filled


def test_fp8_is_read_back_as_the_rounded_weights(tmp_path):
    """By the reader of published FP8 checkpoints, bit for bit; in several files."""
    params = tiny.params(config=WIDE)
    huggingface.save(tmp_path, params, WIDE, dtype=BF16, blocks="e4m3", max_shard_bytes=1 << 16)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    config, found = huggingface.load(tmp_path, dtype=None)
    assert config == WIDE
    read = spec.flatten(found)
    for path, value in spec.flatten(params).items():
        own = jnp.asarray(value, BF16)
        expected = round_matrix(own) if path.split("/")[-1] in MATRICES else own
        np.testing.assert_array_equal(read[path], expected, err_msg=path)


@pytest.mark.parametrize("size", [64, 128, 160, 257, 300, 320, 384])
def test_what_transformers_would_misread_is_refused(size):
    """From the numbers of factors it infers the size of blocks, where they divide the matrix."""
    factors = torch.arange(1.0, 1 - -size // 128)[:, None]
    right = factors.repeat_interleave(128, 0)[:size].expand(-1, 2)
    config = dataclasses.replace(tiny.CONFIG, hidden_size=size)
    written = functools.partial(
        eight_bits.matrices, spec.flatten(param_specs(config)), blocks="e4m3"
    )
    try:
        read = Fp8Dequantize(None)._dequantize_one(torch.ones(size, 2), factors)
    except ValueError:
        read = right  # it says so
    if torch.equal(read, right):
        assert len(written()) == 7 * config.num_layers
    else:
        with pytest.raises(
            ValueError, match=rf"q_proj.weight' is .*of {size} numbers transformers"
        ):
            written()


def test_int8_holds_integers_and_their_factors(tmp_path):
    config = dataclasses.replace(tiny.CONFIG, model_type="qwen2", qkv_bias=True, qk_norm=None)
    params = tiny.params(config=config)
    huggingface.save(tmp_path / "plain", params, config, dtype=BF16)
    huggingface.save(tmp_path / "int8", params, config, dtype=BF16, blocks="int8")
    plain, eight = (load_file(tmp_path / d / "model.safetensors") for d in ("plain", "int8"))
    matrices = {name for name in plain if name.endswith("_proj.weight")}
    assert len(matrices) == 7 * config.num_layers
    assert eight.keys() == plain.keys() | {f"{name}_scale" for name in matrices}
    for name, value in plain.items():
        if name not in matrices:
            np.testing.assert_array_equal(eight[name], value)
            continue
        integers, factors = quantise(jnp.asarray(value))
        np.testing.assert_array_equal(eight[name], integers)
        np.testing.assert_array_equal(eight[f"{name}_scale"], factors)
        assert factors.shape == (len(value), 1)
    content = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert content["quantization_config"]["quant_method"] == "compressed-tensors"
    with pytest.raises(ValueError, match="quantization"):
        huggingface.load(tmp_path / "int8", dtype=None)  # for vLLM, not for a learner


@pytest.mark.parametrize("config", [tiny.MOE, tiny.DEEPSEEK, tiny.QWEN3_5])
def test_what_has_no_files_is_refused(tmp_path, config):
    """Before a tensor is read or written."""
    message = f"latent attention and the delta rule, and {config.model_type} has some of them"
    with pytest.raises(ValueError, match=message):
        huggingface.save(tmp_path, {}, config, dtype=BF16, blocks="int8")
    assert not [*tmp_path.glob("*.safetensors")]


def test_other_kinds_have_no_files():
    with pytest.raises(ValueError, match="blocks=rows has no files; use one of e4m3, int8"):
        eight_bits.matrices(spec.flatten(param_specs(tiny.CONFIG)), blocks="rows")
