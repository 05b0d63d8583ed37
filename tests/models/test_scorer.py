"""A reward model is transformers' classifier with one label: same scores, same bits, same files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl import huggingface
from jaxrl.core.batch import TokenBatch
from jaxrl.core.precision import PRESETS
from jaxrl.models.model import decoder
from jaxrl.models.scorer import sequence_scores, token_scores
from tests.models.references import SIZES, assert_same_model, checkpoint, classifier

PAD = SIZES["pad_token_id"]
F32 = np.dtype("float32")


def token_batch(rows, *, width):
    """Rows of sequences of token ids; what is left is padding."""
    arrays = {name: np.zeros((len(rows), width), np.int32) for name in ("t", "p", "s")}
    arrays["t"][:] = PAD
    for r, sequences in enumerate(rows):
        start = 0
        for segment, tokens in enumerate(sequences, start=1):
            whole = slice(start, start + len(tokens))
            arrays["t"][r, whole] = tokens
            arrays["p"][r, whole] = np.arange(len(tokens))
            arrays["s"][r, whole] = segment
            start += len(tokens)
    unused = jnp.zeros(arrays["t"].shape)
    return TokenBatch(
        tokens=jnp.asarray(arrays["t"]),
        positions=jnp.asarray(arrays["p"]),
        segments=jnp.asarray(arrays["s"]),
        action_mask=unused.astype(bool),
        sampler_logprobs=unused,
        advantages=unused,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "mistral"])
def test_scores_equal_transformers(family, tied, tmp_path):
    reference = classifier(family, tied=tied, dtype=torch.float32)
    reference.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, SIZES["vocab_size"], size) for size in (11, 4, 7, 1)]
    texts[1][1] = PAD  # inside a text it is a token like any other
    texts[2][-2:] = PAD  # and at its end it is padding, as transformers has it

    padded = np.full((4, 11), PAD)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    with torch.no_grad():
        expected = reference(torch.tensor(padded)).logits[:, 0].numpy()

    config, params = huggingface.load(tmp_path, dtype=F32, scored=True)
    assert (config.scored, config.tied) == (True, tied)
    model = decoder(config)
    score = jax.jit(lambda p, b: sequence_scores(model, p, b, precision=PRESETS["fp32"]))
    alone = score(params, token_batch([[t] for t in texts], width=24))
    packed = score(
        params, token_batch([[], [texts[0], texts[1], texts[2]], [texts[3]], []], width=24)
    )
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(alone[:, 1], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[1, 1:4], expected[:3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[2, 1], expected[3], rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(packed) == np.count_nonzero(alone) == 4


def test_scores_follow_the_dtype_policy():
    precision = PRESETS["bf16_master"]
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 8))
    head = jax.random.normal(jax.random.key(1), (1, 8))
    x, w = (np.asarray(a.astype(jnp.bfloat16), np.float32) for a in (hidden, head))
    got = token_scores(hidden, head, precision=precision)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x @ w[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_is_bit_identical(dtype, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    reference = classifier("qwen3", tied=True, dtype=dtype)
    reference.save_pretrained(before)
    config, params = huggingface.load(before, dtype=None)
    (stored,) = {x.dtype for x in jax.tree.leaves(params)}
    huggingface.save(after, params, config, dtype=stored)
    a, b = (load_file(d / "model.safetensors") for d in (before, after))
    assert {k: v.tobytes() for k, v in a.items()} == {k: v.tobytes() for k, v in b.items()}
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        after, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_model(again, reference)
    assert again.config.num_labels == 1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_reward_model_scores_zero(tied, tmp_path):
    checkpoint(tmp_path, "qwen2", tied=tied)
    _, body = huggingface.load(tmp_path, dtype=F32)
    config, params = huggingface.load(tmp_path, dtype=F32, scored=True)
    assert config.scored
    np.testing.assert_array_equal(params.pop("score"), np.zeros((1, 32)))
    body.pop("head", None)
    jax.tree.map(np.testing.assert_array_equal, params, body)


def test_what_does_not_fit_is_named(tmp_path):
    classifier("qwen3", tied=False, dtype=torch.float32).save_pretrained(tmp_path / "good")
    content = load_file(tmp_path / "good" / "model.safetensors")

    def refused(directory, match):
        with pytest.raises(ValueError, match=match):
            huggingface.load(directory, dtype=F32, scored=True)

    file = tmp_path / "good" / "model.safetensors"
    save_file({k: v for k, v in content.items() if k != "score.weight"}, file)
    refused(tmp_path / "good", r"misses 1 tensor\(s\): score\.weight")
    save_file(content | {"score.weight": content["score.weight"][:, :-1].copy()}, file)
    refused(tmp_path / "good", r"score\.weight.*\(1, 31\), expected \(1, 32\)")
    save_file(content | {"lm_head.weight": content["model.embed_tokens.weight"].copy()}, file)
    refused(tmp_path / "good", r"has surplus 1 tensor\(s\): lm_head\.weight")

    classifier("qwen3", tied=True, labels=3, dtype=torch.float32).save_pretrained(
        tmp_path / "three"
    )
    refused(tmp_path / "three", "a classifier with 3 labels.*a reward model has one")
    config = json.loads((tmp_path / "three" / "config.json").read_text())
    del config["id2label"]  # transformers' default, which it does not write, is two
    (tmp_path / "three" / "config.json").write_text(json.dumps(config))
    refused(tmp_path / "three", "a classifier with 2 labels")
