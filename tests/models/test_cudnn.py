"""cuDNN's kernels without a GPU: the arguments that they get, and calls of lowered programs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxrl.core.packing import most_sequences
from jaxrl.core.precision import parse
from jaxrl.models.attention import cudnn, kernels
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.model import decoder
from jaxrl.models.spec import init
from tests import tiny
from tests.models.test_kernels import assert_equal, inputs, layout, results

WINDOWS = [None, 20]


def by_sequence(
    q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length
):
    """jax's packed attention as it is documented: each sequence alone."""
    assert mask_type is fused.MaskType.PADDING_CAUSAL
    assert kv_seqlen is q_seqlen
    assert kv_offsets is q_offsets
    tokens = jnp.arange(q.shape[1])[None]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))

    def of_row(q, k, v, lengths, starts):
        first, end = starts[:-1, None], (starts[:-1] + lengths)[:, None]
        member = (tokens >= first) & (tokens < end) & (first >= 0)
        number = jnp.argmax(member, axis=0)
        distance = tokens.T - tokens
        seen = (number[:, None] == number[None, :]) & (distance >= 0)
        if sliding_window_length is not None:
            seen &= distance < sliding_window_length
        scores = jnp.where(seen[None], scale * jnp.einsum("thd,shd->hts", q, k), -jnp.inf)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)

    return jax.vmap(of_row)(q, k, v, q_seqlen, q_offsets)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_form_gets_the_rows_sequences(window, shared, monkeypatch):
    heads = []

    def kernel(q, k, v, **settings):
        heads.append((q.shape[2], k.shape[2], v.shape[2]))
        return by_sequence(q, k, v, **settings)

    monkeypatch.setattr(fused, "dot_product_attention", kernel)
    monkeypatch.setattr(cudnn, "_SHARED", shared)
    found = results(cudnn.packed, 64, 8, window=window)
    assert_equal(found, results(attention, 64, 8, window=window))
    assert set(heads) == {(4, 2, 2) if shared else (4, 4, 4)}


def test_too_many_sequences_give_nan(monkeypatch):
    monkeypatch.setattr(fused, "dot_product_attention", by_sequence)
    (q, k, v, _), _ = inputs(64, 8, 8, 2)
    segments = jnp.stack([jnp.arange(64), jnp.minimum(jnp.arange(64), most_sequences(64))])
    out = cudnn.packed(q, k, v, segments, scoring=Scoring(None, 0.35), precision=parse("fp32"))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.usefixtures("cudnn_by_xla")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}])
def test_the_mask_is_that_of_attention(sizes, window, monkeypatch):
    monkeypatch.setattr(kernels, "_is_packed", lambda device: False)
    attend = kernels.by_kernel("cudnn", layout=layout(**sizes))
    assert_equal(results(attend, 64, 8, window=window), results(attention, 64, 8, window=window))


@pytest.mark.parametrize(
    ("remat", "forward"), [("none", 1), ("matmuls", 1), ("attention", 1), ("layer", 2)]
)
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("windows", [(), (5, None)])  # alike, or a call for each kind
def test_calls_of_a_layer_for_cuda(remat, forward, hopper, windows, monkeypatch):
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: hopper)
    monkeypatch.setattr(kernels, "_is_packed", lambda device: hopper)
    attend = kernels.by_kernel("cudnn", layout=layout())
    config = dataclasses.replace(tiny.CONFIG, windows=windows)
    model = decoder(config, remat=remat, attend=attend)
    precision = parse("bf16_master")
    params = init(model.specs, jax.random.key(0), dtype=precision.params)
    tokens = jnp.ones((2, 96), jnp.int32)

    def loss(params):
        out = model.hidden(params, tokens, tokens, tokens, precision=precision)
        return jnp.sum(out.astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    calls = re.findall(r"@__cudnn\$fmha\w+", text)
    backward = [call for call in calls if "Backward" in call]
    kinds = max(1, len(windows))
    assert (len(calls) - len(backward), len(backward)) == (forward * kinds, kinds)
    masks = re.findall(r"tensor<[\dx]*96x96xbf16>", text)
    assert bool(masks) is not hopper  # packed: nothing of size [T, T]
