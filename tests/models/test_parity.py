"""The decoder computes what transformers computes, alone, padded and packed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl import huggingface
from jaxrl.core.precision import PRESETS
from jaxrl.models.attention.scores import soft_cap
from jaxrl.models.model import decoder
from tests.models.references import FAMILIES, SIZES, checkpoint

LENGTHS = ((19, 9), (23,), (1, 7, 12))  # sequences of each row; what is left is padding
WIDTH = 30
VARIANTS = ("qwen2_windows", "qwen3_yarn", "llama_linear", "qwen3_moe_raw", "deepseek_v3_direct")
# Whose gradients are compared, and whether the head is the embedding. The other models have no new
# operation.
DISTINCT = {family: family == "gemma2" for family in FAMILIES if family not in VARIANTS}
OTHERS = [
    (family, tied)
    for family in FAMILIES
    for tied in (True, False)
    if (family, tied) not in DISTINCT.items()
]
SHAPE = (len(LENGTHS), WIDTH, SIZES["vocab_size"])
WEIGHTS = np.cos(np.arange(np.prod(SHAPE), dtype=np.float32)).reshape(SHAPE)


def rows(seed=0):
    rng = np.random.default_rng(seed)
    tokens, positions, segments = (np.zeros((len(LENGTHS), WIDTH), np.int32) for _ in range(3))
    # Padding holds any token; torch gives the padding token itself no gradient.
    tokens[:] = rng.integers(1, SIZES["vocab_size"], tokens.shape)
    for r, lengths in enumerate(LENGTHS):
        start = 2 * (r == 1)  # the second row is padded on both sides
        for segment, length in enumerate(lengths, start=1):
            positions[r, start : start + length] = np.arange(length)
            segments[r, start : start + length] = segment
            start += length
    return tokens, positions, segments


def forward(model, params):
    """Hidden states and logits of the rows."""
    inputs = map(jnp.asarray, rows())
    hidden = model.hidden(params, *inputs, precision=PRESETS["fp32"])
    head = model.head(params)
    return hidden, soft_cap(hidden @ head.weights.T, head.cap)


def total(model, params):
    """A sum in which every logit counts differently, and what `forward` returns."""
    real = jnp.asarray(rows()[2] > 0)[..., None]
    hidden, logits = forward(model, params)
    return jnp.sum(jnp.where(real, logits * WEIGHTS, 0)), (hidden, logits)


def sequences():
    """Each sequence alone: its row, where it is in the row, and its tokens."""
    tokens, _, segments = rows()
    for row, lengths in enumerate(LENGTHS):
        for segment in range(1, len(lengths) + 1):
            inside = segments[row] == segment
            yield row, inside, torch.tensor(tokens[row, inside][None])


def apart(a, b):
    """Largest difference, relative to the largest number."""
    assert np.isfinite(a).all()
    return np.abs(a - b).max() / (np.abs(b).max() or 1)


def assert_equal(found, reference):
    """Compares what `forward` returns."""
    hidden, logits = map(np.asarray, found)
    for row, inside, tokens in sequences():
        with torch.no_grad():
            expected = reference(tokens).logits[0].numpy()
            states = reference.model(tokens).last_hidden_state[0].numpy()
        assert apart(logits[row, inside], expected) < 1e-4
        assert apart(hidden[row, inside], states) < 1e-4
        log_probs = (np.asarray(jax.nn.log_softmax(x)) for x in (logits[row, inside], expected))
        assert np.abs(np.subtract(*log_probs)).max() < 1e-4


@pytest.mark.parametrize(("family", "tied"), OTHERS)
def test_hidden_states_and_logits_equal_transformers(family, tied, tmp_path):
    reference = checkpoint(tmp_path, family, tied=tied)
    config, params = huggingface.load(tmp_path, dtype=None)
    assert config.tied == tied
    assert_equal(jax.jit(partial(forward, decoder(config)))(params), reference)


@pytest.mark.parametrize(("family", "tied"), DISTINCT.items())
def test_gradients_too_equal_those_of_transformers(family, tied, tmp_path):
    reference = checkpoint(tmp_path, family, tied=tied)
    config, params = huggingface.load(tmp_path, dtype=None)
    assert config.tied == tied
    gradients = jax.jit(jax.grad(partial(total, decoder(config)), has_aux=True))
    found, states = gradients(params)
    assert_equal(states, reference)
    for row, inside, tokens in sequences():
        (reference(tokens).logits[0] * torch.tensor(WEIGHTS[row, inside])).sum().backward()
    for weight in reference.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    for name, bias in reference.named_buffers():
        if "correction_bias" in name:  # no gradient trains it
            bias.zero_()
    # A checkpoint of gradients: they get the names of the parameters.
    reference.save_pretrained(tmp_path / "gradients")
    expected = huggingface.load(tmp_path / "gradients", dtype=None)[1]
    differences = jax.tree.map(apart, *jax.device_get((found, expected)))
    assert max(jax.tree.leaves(differences)) < 1e-4, differences
