"""Weights in FP8 are read as transformers and torch dequantise them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from jaxrl import huggingface
from jaxrl.huggingface.tensors.fp8 import dequantise
from tests import tiny

BF16 = np.dtype(jnp.bfloat16)
BLOCK = [8, 20]  # 32 columns have one and a half
QUANTISATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": BLOCK,
}
CONFIG = dataclasses.replace(tiny.DEEPSEEK, tied=False)
QUERY = "model.layers.1.self_attn.q_b_proj.weight"
PREDICTION = "model.layers.2.eh_proj.weight"  # behind the layers of the decoder
SCALES = f"{QUERY}_scale_inv"


def random(generator, shape, *, block=BLOCK, dtype=torch.float32):
    """Random finite numbers of a matrix, and the factors of its blocks."""
    numbers = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    grid = [-(-n // size) for n, size in zip(shape, block, strict=True)]
    return numbers, torch.rand(grid, generator=generator).to(dtype)


def expected(numbers, scales, *, block=BLOCK):
    wide = scales.float()
    for axis, size in enumerate(block):
        wide = wide.repeat_interleave(size, axis).narrow(axis, 0, numbers.shape[axis])
    return (numbers.float() * wide).to(torch.bfloat16)


def bits(x):
    return x.contiguous().view(torch.uint8).numpy()


def test_every_byte_is_that_of_transformers():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(64, 2)
    scales = torch.rand((4, 8), generator=torch.Generator().manual_seed(0))
    found = dequantise(numbers.view(torch.uint8).numpy(), scales.numpy(), block=(16, 64))
    wanted = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), wanted)
    assert np.isnan(wanted).sum() == 64 * 4  # two bytes


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def stored(tmp_path_factory, request):
    """A checkpoint as published: factors beside the matrices of the layers."""
    directory = tmp_path_factory.mktemp("fp8")
    huggingface.save(directory, tiny.params(config=CONFIG), CONFIG, dtype=BF16)
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, read = load_file(file), {}
    tensors[PREDICTION] = tensors[QUERY].clone()
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name], scales = random(generator, tensors[name].shape, dtype=request.param)
        tensors[f"{name}_scale_inv"] = scales
        read[name] = expected(tensors[name], scales)
    save_file(tensors, file, metadata={"format": "pt"})
    config = directory / "config.json"
    content = json.loads(config.read_text()) | {"quantization_config": QUANTISATION}
    config.write_text(json.dumps(content))
    return directory, read


def test_fp8_checkpoint_becomes_bf16(stored, tmp_path):
    directory, read = stored
    config, params = huggingface.load(directory, dtype=None)
    own = {str(path[-1]): x.dtype for path, x in jax.tree.leaves_with_path(params)}
    assert {dtype for name, dtype in own.items() if "f32" not in name} == {BF16}
    huggingface.save(tmp_path, params, config, dtype=BF16, source=huggingface.Checkpoint(directory))
    written = load_file(tmp_path / "model.safetensors")
    assert len(read) > 40
    for name, value in read.items():
        np.testing.assert_array_equal(bits(written[name]), bits(value), err_msg=name)
    assert set(written) == {
        x for x in load_file(directory / "model.safetensors") if "_inv" not in x
    }
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda x: x.pop(SCALES), rf"safetensors: tensor '{QUERY}' in F8_E4M3 has no factors"),
        (lambda x: x.pop(QUERY), f"has surplus 1 tensor.*{SCALES}|misses 1 tensor.*{QUERY}"),
        (lambda x: x.update({QUERY: x[QUERY].bfloat16()}), f"'{QUERY}' in BF16 has factors"),
        (lambda x: x.update({SCALES: x[SCALES][:-1]}), rf"{SCALES}' has shape \(3, 1\), exp.*4, 1"),
        (lambda x: x.update({SCALES: x[SCALES].flatten()}), rf"{SCALES}' has shape \(4,\)"),
        (lambda x: x.update({SCALES: x[SCALES].to(torch.int32)}), f"{SCALES}' has dtype I32"),
        (lambda x: x[SCALES].fill_(torch.nan), f"{SCALES}' has factors that are not finite"),
        (lambda x: x[SCALES].fill_(1e36), f"{SCALES}' has factors .* more than 7.57e[+]35"),
        (lambda x: x.update({QUERY: x[QUERY][:8].clone()}), rf"{QUERY}' has shape \(8, 12\), exp"),
        (lambda x: x.update({QUERY: x[QUERY].flatten()}), rf"{QUERY}' has shape \(384,\), exp"),
    ],
)
def test_what_does_not_fit_is_named(damage, named, stored, tmp_path):
    tensors = load_file(stored[0] / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((stored[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=named):
        huggingface.load(tmp_path, dtype=None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_block_size": None}, r"json: quantization_config.weight_block_size=None: exp"),
        ({"weight_block_size": [128]}, r"quantization_config.weight_block_size=\[128\]"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size.0=0"),
        ({"activation_scheme": "static"}, "activation_scheme='static': expected 'dynamic'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4': expected 'fp8'"),
        ({"quant_method": "awq"}, "quantization_config=.* is not supported"),
    ],
)
def test_other_quantisations_are_refused(change, named, stored, tmp_path):
    content = json.loads((stored[0] / "config.json").read_text())
    content["quantization_config"] = QUANTISATION | change
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=named):
        _ = huggingface.Checkpoint(tmp_path).config
