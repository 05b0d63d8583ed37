"""Tensors of all experts of a layer are read as transformers reads them."""

import re

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl import huggingface
from jaxrl.huggingface.files import SINGLE
from tests.models.references import EXPERTS, checkpoint

COUNT = EXPERTS["num_experts"]
FIRST = "model.layers.0.mlp.experts"


def join(tensors):
    """The tensors of a checkpoint with two for the experts of a layer."""
    joint = {name: x for name, x in tensors.items() if ".experts." not in name}
    for path in {name.partition(".experts.")[0] + ".experts" for name in tensors.keys() - joint}:
        gate, up, down = (
            np.stack([tensors[f"{path}.{i}.{part}_proj.weight"] for i in range(COUNT)])
            for part in ("gate", "up", "down")
        )
        joint[f"{path}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        joint[f"{path}.down_proj"] = down
    return joint


def save(tensors, directory):
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


@pytest.fixture
def joined(tmp_path):
    """A checkpoint in this form, with the model and the tensors that it is made of."""
    reference = checkpoint(tmp_path, "qwen3_5_moe_text", tied=False, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / SINGLE)
    save(join(tensors), tmp_path)
    return tmp_path, reference, tensors


def test_joint_experts_are_read_like_transformers(joined, tmp_path):
    directory, reference, tensors = joined
    again = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    for name, x in reference.state_dict().items():
        assert torch.equal(again[name], x), name
    config, params = huggingface.load(directory, dtype=None)
    huggingface.save(tmp_path / "out", params, config, dtype=jax.tree.leaves(params)[0].dtype)
    written = load_file(tmp_path / "out" / SINGLE)
    assert written.keys() == tensors.keys()
    for name, x in tensors.items():
        assert (x.dtype, x.tobytes()) == (written[name].dtype, written[name].tobytes()), name


def test_another_number_of_experts_is_named(joined):
    directory, _, tensors = joined
    name = f"{FIRST}.down_proj"
    found = join(tensors)
    save(found | {name: found[name][1:].copy()}, directory)
    with pytest.raises(ValueError, match=rf"{name}' has shape \(5, 32, 24\), expected \(6, 32,"):
        huggingface.load(directory, dtype=None)


def test_a_checkpoint_with_both_is_refused(joined):
    directory, _, tensors = joined
    name = f"{FIRST}.3.up_proj.weight"
    save(join(tensors) | {name: tensors[name]}, directory)
    with pytest.raises(ValueError, match=re.escape(f"holds '{name}', which is also in")):
        huggingface.load(directory, dtype=None)


def test_surplus_layer_is_detected(joined):
    directory, _, tensors = joined
    surplus = {"model.layers.7.mlp.experts.down_proj": np.zeros((6, 32, 24), np.float32)}
    save(join(tensors) | surplus, directory)
    with pytest.raises(ValueError, match=r"surplus 1 .*layers\.7\.mlp\.experts\.down_proj"):
        huggingface.load(directory, dtype=None)
