"""Drawn tokens and their log-probs follow the truncated distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.draw_token import categorical, draw_settings, draw_tokens
from jaxrl.sampling.embedded.truncation import truncate, truncation

_draw_tokens = jax.jit(lambda logits, keys, settings: draw_tokens(logits, keys, settings=settings))
_truncate = jax.jit(truncate)


def _by_sorting(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """Truncates one row in f64 by the settings' definitions; tokens must not be tied."""
    probs = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    probs[probs < min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()


CASES = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"temperature": 1.7, "min_p": 0.05, "top_k": 20, "top_p": 0.8},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_logprobs_follow_the_truncated_distribution(case):
    rng = np.random.default_rng(0)
    draws, vocab = 20000, 37
    logits = rng.normal(0, 2, vocab).astype(np.float32)
    expected = _by_sorting(logits, **case)
    tokens, logprobs, _ = _draw_tokens(
        jnp.broadcast_to(logits, (draws, vocab)),
        jax.random.split(jax.random.key(1), draws),
        draw_settings(SamplingParams(max_tokens=1, **case)),
    )
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any()
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=2e-5)
    error = (counts - draws * expected) / np.sqrt(draws * expected * (1 - expected) + 1e-9)
    assert np.abs(error[expected > 1e-3]).max() < 4.5


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0, 0.3),
)
def test_truncation_equals_sorting(seed, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, 3, (4, 61)).astype(np.float32)
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    kept = np.asarray(_truncate(weights, truncation(params))) > 0
    for row, row_kept in zip(logits, kept, strict=True):
        expected = _by_sorting(row, top_k=top_k, top_p=top_p, min_p=min_p) > 0
        # An f32 sum may round the token at the threshold to the other side.
        assert (row_kept != expected).sum() <= (top_p < 1)
        assert row_kept[row.argmax()]


def test_tied_tokens_are_kept_together():
    weights = jnp.array([[0.5, 1.0, 0.5, 0.1]])
    for params in (
        SamplingParams(max_tokens=1, top_k=2),
        SamplingParams(max_tokens=1, top_p=0.55),
        SamplingParams(max_tokens=1, min_p=0.5),
    ):
        np.testing.assert_array_equal(_truncate(weights, truncation(params)), [[0.5, 1.0, 0.5, 0]])


def test_greedy_draws_the_first_best_token():
    logits = jnp.array([[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 2.0, 3.0]])
    params = SamplingParams(max_tokens=1, temperature=0, top_k=1, top_p=0.1)
    tokens, logprobs, _ = _draw_tokens(
        logits, jax.random.split(jax.random.key(0), 2), draw_settings(params)
    )
    np.testing.assert_array_equal(tokens, [1, 0])
    expected = jax.nn.log_softmax(logits)[jnp.arange(2), tokens]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=5, max_size=5),
    uniforms=st.tuples(*[st.sampled_from([0.0, 0.5, 1 - 2.0**-23])] * 2),
)
def test_zero_weight_token_is_never_drawn(weights, uniforms):
    weights = [*weights, 1.0, 0.0]
    row = jnp.array([weights], jnp.float32)
    token = jax.jit(categorical)(row, jnp.array([uniforms], jnp.float32))
    assert weights[int(token[0])] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1.1},
        {"stop": ((1,), ())},
        {"stop": ((1,), (5, -1))},
        {"seed": -1},
    ],
    ids=str,
)
def test_params_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
        SamplingParams(**{"max_tokens": 4, **wrong})
