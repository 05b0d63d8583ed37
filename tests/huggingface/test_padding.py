"""Texts of a checkpoint: the padding token of a reward model, and a template that is none."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxrl import huggingface
from jaxrl.core.precision import PRESETS
from jaxrl.models.model import decoder
from jaxrl.models.scorer import sequence_scores
from tests import tiny
from tests.models.test_scorer import token_batch


def change(directory, **keys):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return huggingface.Checkpoint(directory)


@pytest.mark.parametrize(("pad", "expected"), [("<pad>", 0), ("<unk>", 2), (None, 1)])
def test_an_exported_reward_model_scores_batches_in_transformers(pad, expected, tmp_path):
    """Also without a padding token in config.json: the tokenizer's, else its end token."""
    config = dataclasses.replace(tiny.CONFIG, pad_id=None)
    base = change(tiny.write_checkpoint(tmp_path / "base", config=config), pad_token=pad)
    assert base.scorer_config.pad_id == expected
    model = decoder(base.scorer_config)
    params = dict(tiny.params(config=base.scorer_config))
    params["score"] = jax.random.normal(jax.random.key(1), params["score"].shape)
    dtype = np.dtype("float32")
    exported = tmp_path / "exported"
    huggingface.save(exported, params, model.config, dtype=dtype, source=base)

    texts = [[5, 6, 7, 8, 9], [5, 6], [7, 8, 1]]  # the last one ends in the end token
    padded = torch.tensor([text + [expected] * (5 - len(text)) for text in texts])
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    with torch.no_grad():
        theirs = reference(padded).logits[:, 0].numpy()
    batch = token_batch([[np.array(text)] for text in texts], width=8)
    ours = sequence_scores(model, params, batch, precision=PRESETS["fp32"])
    assert np.ptp(theirs) > 0.01
    np.testing.assert_allclose(ours[:, 1], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("template", [[1], ["x"], [{"name": "a"}], 7, {"a": 1}, [None], True])
def test_a_template_that_is_no_text_is_named(template, tmp_path):
    broken = change(tiny.write_checkpoint(tmp_path), chat_template=template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template=.*not a valid"):
        _ = broken.tokenizer


def test_named_templates_are_read(tmp_path):
    both = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    checkpoint = change(tiny.write_checkpoint(tmp_path), chat_template=both)
    assert checkpoint.tokenizer.get_chat_template() == "a"
