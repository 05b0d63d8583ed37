"""The language model inside of a model of images and text: read, trained alone, exported whole."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl import huggingface
from jaxrl.core.precision import PRESETS
from jaxrl.huggingface.files import SINGLE
from jaxrl.models.model import decoder
from tests.models.references import DELTA, EXPERTS, SIZES, assert_same_model

F32 = np.dtype(np.float32)
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
MODELS = {
    "qwen3_5": (
        transformers.Qwen3_5Config,
        transformers.Qwen3_5ForConditionalGeneration,
        DELTA | {"head_dim": 16},
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 20},
    ),
}
EXTRA = {"mtp.fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}


def write(directory, family, *, tied):
    """A random Qwen3.5 with images as transformers writes it, and with a layer more."""
    make_config, make, sizes = MODELS[family]
    config = make_config(
        text_config=SIZES | sizes | {"tie_word_embeddings": tied, "mtp_num_hidden_layers": 1},
        vision_config=VISION,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = make(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)
    save_file(load_file(directory / SINGLE) | EXTRA, directory / SINGLE, metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module", params=MODELS)
def stored(tmp_path_factory, request):
    directory = tmp_path_factory.mktemp("wrapped")
    return directory, write(directory, request.param, tied=False)


def bits(directory):
    content = load_file(directory / SINGLE)
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in content.items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_transformers(family, tied, tmp_path):
    reference = write(tmp_path, family, tied=tied)
    config, params = huggingface.load(tmp_path, dtype=None)
    assert config.tied == tied
    tokens = np.arange(2, 20)[None]
    places, model = jnp.arange(18)[None], decoder(config)
    run = jax.jit(partial(model.hidden, precision=PRESETS["fp32"]))
    found = run(params, jnp.asarray(tokens), places, jnp.ones_like(places))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits[0].numpy()
    logits = np.asarray(found[0] @ model.unembedding(params).T)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_export_keeps_every_tensor(stored, tmp_path):
    before, reference = stored
    processor = "preprocessor_config.json"  # without it transformers and vLLM read no image
    (before / processor).write_text('{"patch_size": 4}')
    config, params = huggingface.load(before, dtype=None)
    huggingface.save(tmp_path, params, config, dtype=F32, source=huggingface.Checkpoint(before))
    assert bits(tmp_path) == bits(before)
    assert (tmp_path / processor).read_text() == (before / processor).read_text()
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["text_config"]["mtp_num_hidden_layers"] == 1
    assert huggingface.Checkpoint(tmp_path).config == config
    again, info = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    sizes = {key: getattr(reference.config.vision_config, key) for key in VISION}
    assert sizes == {key: getattr(again.config.vision_config, key) for key in VISION}
    assert_same_model(again, reference)


def test_the_language_model_alone_can_be_written(stored, tmp_path):
    before, reference = stored
    config, params = huggingface.load(before, dtype=None)
    alone = dataclasses.replace(config, wrapped=False)
    huggingface.save(tmp_path, params, alone, dtype=F32, source=huggingface.Checkpoint(before))
    assert not any("visual" in name or "mtp" in name for name in bits(tmp_path))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    inner = type(again)(again.config).eval()
    inner.model, inner.lm_head = reference.model.language_model, reference.lm_head
    assert_same_model(again, inner)


def test_reward_model_starts_from_the_text_part(stored, tmp_path):
    config, params = huggingface.load(stored[0], dtype=F32, scored=True)
    assert not np.any(params["score"])
    huggingface.save(tmp_path, params, config, dtype=F32, source=huggingface.Checkpoint(stored[0]))
    assert huggingface.load(tmp_path, dtype=F32, scored=True)[0] == config


@pytest.mark.parametrize("source", [None, "elsewhere"])
def test_an_export_without_its_images_is_refused(source, stored, tmp_path):
    config, params = huggingface.load(stored[0], dtype=None)
    source = source and huggingface.Checkpoint(tmp_path / source)
    with pytest.raises(ValueError, match=r"does not have the qwen3_5\w*_text model of images and"):
        huggingface.save(tmp_path, params, config, dtype=F32, source=source)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": None}, "text_config=None: expected an object with model_type='qwen3_5_"),
        ({"text_config": {"model_type": "llama"}}, "text_config={'model_type': 'llama'}: expected"),
        ({"architectures": ["Other"]}, r"architectures=\['Other'\] with model_type='qwen3_5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True and False in text_config"),
        ({"model_type": ["qwen3_5"]}, r"model_type=\['qwen3_5'\] is not supported"),
    ],
)
def test_what_does_not_fit_is_named(change, named, stored, tmp_path):
    content = json.loads((stored[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=named):
        _ = huggingface.Checkpoint(tmp_path).config
