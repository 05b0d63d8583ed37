"""Splash attention in interpret mode equals attention by XLA, gradients too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models.attention import kernels, splash, splash_blocks, splash_forward
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.model import decoder
from jaxrl.models.spec import abstract
from tests import tiny
from tests.models.attending import SCALE, SINKS, assert_equal, expected, inputs, layout, results


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}])
def test_splash_attention_in_interpret_mode(sizes):
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, 256, 128), expected(256, 128))


@pytest.fixture
def in_fast_memory(monkeypatch):
    """Each head of a row fits, and has blocks of 128."""
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(splash_blocks, "_FAST", {kind: 96})
    monkeypatch.setattr(splash, "_BLOCKS", (1024, 128))


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ({}, {}),
        ({}, {"window": 20, "head_dim": 192, "value_dim": 96}),
        (
            {"data": 2, "context": 2, "tensor": 2},
            {"sinks": SINKS, "cap": 0.7, "window": 150, "head_dim": 64},
        ),
    ],
)
def test_splash_attention_of_rows_in_fast_memory(sizes, form, in_fast_memory):
    settings: Any = {"length": 256, "head_dim": 128} | form
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, **settings), results(attention, **settings))


def test_what_no_query_sees_is_skipped_and_no_more_is_masked_than_must(in_fast_memory):
    segments = np.repeat([[1, 2, 0], [1, 1, 1]], [256, 200, 56], axis=1).astype(np.int32)
    tokens = splash_blocks.Tokens(segments, segments, jnp.int32(0))
    i, j = np.arange(512)[None, :, None], np.arange(512)[None, None, :]
    for window in (None, 150):
        seen = (j <= i) & (segments[:, :, None] == segments[:, None, :])
        if window is not None:
            seen &= i - j < window
        blocks = seen.reshape(2, 4, 128, 4, 128)
        wanted = np.where(blocks.all((2, 4)), 2, np.where(blocks.any((2, 4)), 1, 0))
        settings = splash_blocks.Settings(128, window, None)
        np.testing.assert_array_equal(splash_blocks.pairs(tokens, settings), wanted.swapaxes(1, 2))
        codes, counts = splash_forward._listed(tokens, settings)
        for row, kinds in enumerate(wanted.reshape(2, 16)):
            listed = 4 * np.arange(16) + kinds
            np.testing.assert_array_equal(codes[row, : counts[row]], listed[kinds > 0])

    attend = kernels.by_kernel("splash", layout=layout(), interpret=True)
    form: Any = {"length": 512, "head_dim": 128, "segments": jnp.asarray(segments)}
    assert_equal(results(attend, **form), results(attention, **form))


@pytest.mark.parametrize(("kv_heads", "sinks", "block"), [(8, False, 128), (1, True, 256)])
def test_log_sum_exp_of_rows_in_fast_memory(kv_heads, sinks, block):
    """For each query it is that of all scores that the query sees, and its sink."""
    rng = np.random.default_rng(0)
    batch, length, size = 2, 256, 128
    q, k, v = (
        rng.normal(size=(heads, batch * length, size)).astype(np.float32)
        for heads in (8, kv_heads, kv_heads)
    )
    q /= 4
    segments = np.sort(rng.integers(1, 4, (batch, length)), axis=1).astype(np.int32)
    tokens = splash_blocks.Tokens(segments, segments, jnp.int32(0))
    given = jnp.linspace(-1, 30, 8) if sinks else None
    settings = splash_blocks.Settings(block, None, None, interpret=True)
    out, found = splash_forward._outputs(q, k, v, tokens, given, settings)

    rows = (x.reshape(len(x), batch, length, size).astype(np.float64) for x in (q, k, v))
    q, k, v = (np.repeat(x, 8 // len(x), axis=0) for x in rows)
    seen = np.tril(segments[:, :, None] == segments[:, None, :])
    scores = np.where(seen, np.einsum("hbqd,hbkd->hbqk", q, k), -np.inf)
    sums = np.exp(scores).sum(3)
    if given is not None:
        sums += np.exp(np.asarray(given, np.float64))[:, None, None]
    wanted = np.einsum("hbqk,hbkd->hbqd", np.exp(scores) / sums[..., None], v)
    np.testing.assert_allclose(found.reshape(sums.shape), np.log(sums), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_keys_that_a_decoder_multiplies_have_the_bits_of_those_that_splash_multiplies():
    attend = kernels.by_kernel("splash", layout=layout(), interpret=True)
    (q, k, v, dout), segments = inputs(128, 128, 128, 1)
    q, k, v, dout = (x.astype(jnp.bfloat16) for x in (q, k, v, dout))

    def results(factor):
        def call(q, k, v):
            k = (k.astype(jnp.float32) * factor).astype(k.dtype)
            scoring = Scoring(None, SCALE / factor)
            return attend(q, k, v, segments, scoring=scoring, precision=parse("bf16_master"))

        out, backward = jax.vjp(call, q, k, v)
        return out, *backward(dout)

    for a, b in zip(results(SCALE), results(1.0), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "sizes", [{}, {"data": 2, "context": 2, "tensor": 2}, {"data": 2, "context": 2}]
)
def test_splash_with_one_window(sizes):
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, 256, 128, window=20), results(attention, 256, 128, window=20))


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ({}, {"sinks": SINKS, "cap": 0.7, "rows": 1}),
        ({}, {"head_dim": 192, "value_dim": 96}),
        (
            {"data": 2, "context": 2, "tensor": 2},
            {"sinks": SINKS, "cap": 0.7, "window": 20, "head_dim": 64},
        ),
    ],
)
def test_splash_with_the_scores_and_heads_of_all_families(sizes, form):
    settings: Any = {"length": 256, "head_dim": 128} | form
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, **settings), results(attention, **settings))


def test_splash_computes_only_blocks_that_share_a_sequence():
    lengths, length = [300, 50, 400, 200, 50], 1024
    segments = np.repeat([1, 2, 3, 4, 0], [*lengths[:-1], length - sum(lengths[:-1])])
    own = np.tril(segments[:, None] == segments[None, :])
    wanted = own.reshape(8, 128, 8, 128).any((1, 3))
    q, there = jnp.zeros((1, length, 4, 128)), layout()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(splash, "_BLOCKS", (256, 128))
        scoring = Scoring(None, SCALE)
        kernel = splash.build(q, q, there, scoring=scoring, interpret=True)
    ids = jnp.asarray(segments, jnp.int32)
    of_row = splash._of_rows(kernel, ids[None], ids[None])
    for info in (of_row.fwd_mask_info, of_row.dq_mask_info, of_row.dkv_mask_info):
        assert np.count_nonzero(info.block_mask) == np.count_nonzero(wanted) == 20


def test_blocks_between_sequences_are_left_out_and_nothing_changes(monkeypatch):
    monkeypatch.setattr(splash, "_BLOCKS", (1024, 128))
    left, prune = [], splash._of_rows

    def pruned(kernel, *segments):
        found = prune(kernel, *segments)
        for info in (kernel.fwd_mask_info, found.fwd_mask_info):
            jax.debug.callback(lambda mask: left.append(np.count_nonzero(mask)), info.block_mask)
        return found

    monkeypatch.setattr(splash, "_of_rows", pruned)
    segments = jnp.asarray(np.repeat([1, 2, 0], [256, 200, 56])[None], jnp.int32)
    attend = kernels.by_kernel("splash", layout=layout(), interpret=True)
    form: Any = {"length": 512, "head_dim": 128, "rows": 1, "segments": segments}
    found = results(attend, **form)
    jax.effects_barrier()
    assert {*left} == {10, 6}
    assert_equal(found, results(attention, **form))


@pytest.mark.parametrize(
    ("tokens", "kind", "block", "one"),
    [
        (4096, "TPU v6 lite", 512, True),
        (8192, "TPU v6 lite", 1024, True),
        (9 * 512, "TPU v6 lite", 512, True),
        (16_384, "TPU v6 lite", 1024, False),
        (4096, "TPU v5", 512, True),
        (8192, "TPU v5", 512, False),
        (131_072, "TPU v5", 512, False),
        (262_144, "TPU v5", 1024, False),
        (768, "TPU v5", 256, True),
        (768, "TPU v4", 256, False),
    ],
)
def test_blocks_of_splash(tokens, kind, block, one):
    assert splash.block_size(tokens, kind) == block
    sizes = {"queries": tokens, "keys": tokens, "head_dim": 128, "value_dim": 128}
    assert splash_blocks.fits(kind, **sizes) == one


@pytest.mark.parametrize("fast", [0, 96])
@pytest.mark.parametrize(("remat", "forward"), [("attention", 1), ("layer", 2)])
def test_what_is_kept_of_splash_spares_its_forward_kernel(remat, forward, fast, monkeypatch):
    monkeypatch.setattr(splash_blocks, "_FAST", {jax.devices()[0].device_kind: fast})
    attend = kernels.by_kernel("splash", layout=layout(), interpret=True)
    model = decoder(tiny.CONFIG, remat=remat, attend=attend)
    tokens = jnp.ones((2, 128), jnp.int32)
    params = abstract(model.specs, dtype=jnp.bfloat16)

    def loss(params):
        out = model.hidden(params, tokens, tokens, tokens, precision=parse("bf16_master"))
        return jnp.sum(out.astype(jnp.float32))

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    name = "splash_mha_forward" if fast else "splash_mha_fwd_segmented_residuals"
    assert text.count(f"name={name}") == forward
    assert text.count("name=splash_mha_gradients") == (fast > 0)
    assert "reduce_precision" not in text  # a pass of its own on TPUs
