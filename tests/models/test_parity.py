"""The decoder computes what transformers computes, alone, padded and packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl.core.precision import PRESETS
from jaxrl.models import huggingface
from jaxrl.models.decoder import decoder
from tests.models.references import FAMILIES, SIZES, checkpoint

LENGTHS = ((19, 9), (23,), (1, 7, 12))  # sequences of each row; what is left is padding
WIDTH = 30


def rows(seed=0):
    rng = np.random.default_rng(seed)
    tokens, positions, segments = (np.zeros((len(LENGTHS), WIDTH), np.int32) for _ in range(3))
    tokens[:] = rng.integers(0, SIZES["vocab_size"], tokens.shape)  # padding holds any token
    for r, lengths in enumerate(LENGTHS):
        start = 2 * (r == 1)  # the second row is padded on both sides
        for segment, length in enumerate(lengths, start=1):
            positions[r, start : start + length] = np.arange(length)
            segments[r, start : start + length] = segment
            start += length
    return tokens, positions, segments


def max_difference(model, params, expected_of):
    """Largest difference of logits relative to their scale, and of log-probs."""
    tokens, positions, segments = rows()

    @jax.jit
    def forward(params):
        hidden = model.hidden(
            params,
            *map(jnp.asarray, (tokens, positions, segments)),
            precision=PRESETS["fp32"],
        )
        return hidden @ model.unembedding(params).T

    logits = np.asarray(forward(params))
    assert np.isfinite(logits).all()
    worst = [0.0, 0.0]
    for row, lengths in enumerate(LENGTHS):
        for segment in range(1, len(lengths) + 1):
            inside = segments[row] == segment
            expected = expected_of(tokens[row, inside])
            got = logits[row, inside]
            difference = np.abs(got - expected).max() / np.abs(expected).max()
            log_probs = (np.asarray(jax.nn.log_softmax(x)) for x in (got, expected))
            apart = np.abs(np.subtract(*log_probs)).max()
            worst = [max(worst[0], difference), max(worst[1], apart)]
    return worst


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tied, tmp_path):
    reference = checkpoint(tmp_path, family, tied=tied)

    def expected(tokens):
        with torch.no_grad():
            return reference(torch.tensor(tokens[None])).logits[0].numpy()

    config, params = huggingface.load(tmp_path, dtype=None)
    assert config.tied == tied
    logits, log_probs = max_difference(decoder(config), params, expected)
    assert logits < 1e-4
    assert log_probs < 1e-4
