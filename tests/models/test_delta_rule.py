"""The gated delta rule: chunks and single tokens compute what transformers computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from jaxrl.core.precision import PRESETS, parse
from jaxrl.models.delta_rule import (
    Gates,
    causal_convolution,
    convolution_step,
    delta_rule,
    delta_step,
)

FP32 = PRESETS["fp32"]
LENGTHS = ((70, 130), (3, 61, 64, 72))  # segments that end within chunks and with them
WIDTH = 205  # of rows; the first one is padded in front, both behind
KEYS, HEADS, SIZE, VALUES = 2, 4, 16, 12
BY_TOKEN = parse("fp32,sums=fixed")
run = jax.jit(delta_rule, static_argnames="precision")


def inputs(seed=0, *, alike=0.0):
    """Queries, keys, values and gates; keys are `alike` between 0 and 1."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), WIDTH)
    q, k = rng.normal(size=(2, *shape, KEYS, SIZE))
    k = alike + (1 - alike) * k
    v = rng.normal(size=(*shape, HEADS, VALUES))
    decay = -rng.exponential(0.1 if alike else 2.0, (*shape, HEADS))
    beta = 1 / (1 + np.exp(-rng.normal(1 + 4 * alike, 1, (*shape, HEADS))))
    return tuple(np.asarray(x, np.float32) for x in (q, k, v, decay, beta))


def segments():
    found = np.zeros((len(LENGTHS), WIDTH), np.int32)
    for row, lengths in enumerate(LENGTHS):
        start = 3 * (row == 0)
        for segment, length in enumerate(lengths, start=1):
            found[row, start : start + length] = segment
            start += length
    return found


def parts():
    """The row and the slice of each segment."""
    rows = segments()
    for row, lengths in enumerate(LENGTHS):
        for segment in range(1, len(lengths) + 1):
            inside = np.flatnonzero(rows[row] == segment)
            yield row, slice(inside[0], inside[-1] + 1)


def of_torch(function, arrays, row, part):
    q, k, v, decay, beta = (x[row, part][None] for x in arrays)
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return function(q, k, v, decay, beta, **settings)


def ours(arrays, precision=FP32):
    q, k, v, decay, beta = map(jnp.asarray, arrays)
    return run(q, k, v, Gates(decay, beta), jnp.asarray(segments()), precision=precision)


@pytest.mark.parametrize("precision", [FP32, BY_TOKEN], ids=["chunks", "tokens"])
@pytest.mark.parametrize("alike", [0.0, 1.0], ids=["random keys", "equal keys"])
def test_packed_rows_equal_transformers(alike, precision):
    arrays = inputs(alike=alike)
    out, states = map(np.asarray, ours(arrays, precision))
    tensors = list(map(torch.tensor, arrays))
    for row, part in parts():
        for function in (
            theirs.torch_recurrent_gated_delta_rule,
            theirs.torch_chunk_gated_delta_rule,
        ):
            expected, state = of_torch(function, tensors, row, part)
            np.testing.assert_allclose(out[row, part], expected[0], rtol=1e-4, atol=2e-5)
            if part.stop >= WIDTH - 5:  # the row's last
                np.testing.assert_allclose(states[row], state[0], rtol=1e-4, atol=2e-5)


def test_gradients_equal_those_of_transformers():
    arrays = inputs()
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    weights = np.cos(np.arange(np.prod(arrays[2].shape), dtype=np.float32))
    weights = weights.reshape(arrays[2].shape)
    for row, part in parts():
        out, _ = of_torch(theirs.torch_chunk_gated_delta_rule, tensors, row, part)
        (out[0] * torch.tensor(weights[row, part])).sum().backward()
    rows = segments()

    @partial(jax.jit, static_argnames="precision")
    @jax.grad
    def gradient(arrays, precision=FP32):
        q, k, v, decay, beta = arrays
        out, _ = delta_rule(q, k, v, Gates(decay, beta), jnp.asarray(rows), precision=precision)
        return jnp.sum(jnp.where(rows[..., None, None] > 0, out * weights, 0))

    found, fixed = (
        gradient(tuple(map(jnp.asarray, arrays)), precision=one) for one in (FP32, BY_TOKEN)
    )
    for mine, other, tensor in zip(found, fixed, tensors, strict=True):
        expected = np.asarray(tensor.grad)
        np.testing.assert_allclose(mine, expected, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_allclose(other, mine, atol=1e-6 * np.abs(expected).max())


def test_single_tokens_equal_chunks():
    arrays = inputs(1)
    expected, states = ours(arrays)
    row, part = len(LENGTHS) - 1, list(parts())[-1][1]
    q, k, v, decay, beta = (jnp.asarray(x[row, part])[:, None, None] for x in arrays)

    def step(state, token):
        q, k, v, decay, beta = token
        out, state = delta_step(q, k, v, Gates(decay, beta), state, precision=FP32)
        return state, out[0, 0]

    zeros = jnp.zeros((1, HEADS, SIZE, VALUES))
    state, out = jax.lax.scan(step, zeros, (q, k, v, decay, beta))
    np.testing.assert_allclose(out, expected[row, part], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state[0], states[row], rtol=1e-4, atol=1e-5)


def test_a_convolution_reads_its_own_segment():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(LENGTHS), WIDTH, 6)).astype(np.float32)
    weight = rng.normal(size=(6, 4)).astype(np.float32)
    rows = jnp.asarray(segments())
    found = causal_convolution(jnp.asarray(x), jnp.asarray(weight), rows, precision=FP32)
    for row, part in parts():
        alone = torch.tensor(x[row, part].T[None])
        expected = theirs.causal_conv1d_fn(alone, torch.tensor(weight), activation="silu")
        np.testing.assert_allclose(found[row, part], expected[0].T, rtol=1e-5, atol=1e-5)
        window = jnp.asarray(x[row, part][-4:])[None]
        if window.shape[1] == 4:
            last = convolution_step(window, jnp.asarray(weight), precision=FP32)
            np.testing.assert_allclose(last[0, 0], found[row, part][-1], rtol=1e-6, atol=1e-6)


def test_states_are_wide_and_results_are_activations():
    precision = PRESETS["bf16_master"]
    q, k, v, decay, beta = map(jnp.asarray, inputs())
    rule = partial(delta_rule, precision=precision)
    out, state = jax.eval_shape(rule, q, k, v, Gates(decay, beta), jnp.asarray(segments()))
    assert (out.dtype, state.dtype) == (precision.activations, precision.accumulate)
