"""Weights in MXFP4 are read as transformers dequantises them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxrl import huggingface
from jaxrl.huggingface.tensors.mxfp4 import unpack
from tests import tiny

BF16 = np.dtype(jnp.bfloat16)
SIZE = 64  # groups have 32 numbers
CONFIG = dataclasses.replace(
    tiny.GPT_OSS,
    intermediate_size=SIZE,
    experts=dataclasses.replace(tiny.GPT_OSS.experts, intermediate_size=SIZE),
)
EXPERTS = "model.layers.1.mlp.experts"


def packed(rng, *shape):
    """Random bytes, with exponents that bf16 has."""
    blocks, scales = rng.integers(0, 256, (*shape, 16)), rng.integers(10, 240, shape)
    return blocks.astype(np.uint8), scales.astype(np.uint8)


def dequantised(blocks, scales):
    """The tensor [E, in, out] by transformers."""
    found = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    return found.float().numpy()


def test_every_byte_and_exponent_decodes():
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 16, 16))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16))
    found = unpack(blocks, scales)[2:253].astype(np.float64).reshape(251, 256, 2)
    digits = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed, byte = np.concatenate([digits, -digits]), np.arange(256)
    wanted = np.stack([signed[byte & 15], signed[byte >> 4]], axis=-1)
    np.testing.assert_array_equal(found, wanted * 2.0 ** (np.arange(2, 253) - 127)[:, None, None])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint as published: blocks and scales in place of the experts' matrices."""
    directory = tmp_path_factory.mktemp("mxfp4")
    huggingface.save(directory, tiny.params(config=CONFIG), CONFIG, dtype=BF16)
    rng, file = np.random.default_rng(0), directory / "model.safetensors"
    tensors, expected = load_file(file), {}
    for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = packed(rng, experts, outputs, inputs // 32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = dequantised(blocks, scales)
    save_file(tensors, file, metadata={"format": "pt"})
    config = directory / "config.json"
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return directory, expected


def test_mxfp4_checkpoint_becomes_bf16(stored, tmp_path):
    directory, expected = stored
    config, params = huggingface.load(directory, dtype=None)
    assert {x.dtype for x in jax.tree.leaves(params)} == {BF16}
    huggingface.save(tmp_path, params, config, dtype=BF16)
    written = load_file(tmp_path / "model.safetensors")
    assert len(expected) == 2 * config.num_layers
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name].astype(np.float32), value)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda x: x.pop(f"{EXPERTS}.down_proj_scales"), "misses 1 tensor.*down_proj"),
        (
            lambda x: x.update({"a_blocks": x[f"{EXPERTS}.down_proj_blocks"]}),
            "has surplus 1 tensor.*a_blocks",
        ),
        (
            lambda x: x.update(
                {f"{EXPERTS}.down_proj_scales": x[f"{EXPERTS}.down_proj_scales"][:, :16]}
            ),
            r"down_proj' \(8, 64, 16\); expected \(8, 64, 32\)",
        ),
        (
            lambda x: x.update(
                {f"{EXPERTS}.down_proj_blocks": x[f"{EXPERTS}.down_proj_blocks"][..., :8]}
            ),
            r"down_proj_blocks' has shape .* 8\), expected .* 16\)",
        ),
        (
            lambda x: x.update(
                {f"{EXPERTS}.down_proj_scales": x[f"{EXPERTS}.down_proj_scales"].astype(np.int8)}
            ),
            "down_proj_scales' has dtype I8; supported are U8",
        ),
    ],
)
def test_what_does_not_fit_is_named(damage, named, stored, tmp_path):
    tensors = load_file(stored[0] / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((stored[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=named):
        huggingface.load(tmp_path, dtype=None)
