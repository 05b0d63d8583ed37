"""cuDNN's kernels without a GPU: the arguments that they get, and calls of lowered programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxrl.core import runs as bounds
from jaxrl.core.precision import parse
from jaxrl.core.runs import Runs
from jaxrl.models.attention import cudnn, kernels
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.model import decoder
from jaxrl.models.spec import abstract
from tests import tiny
from tests.models.attending import assert_equal, inputs, layout, results

WINDOWS = [None, 20]


def by_sequence(
    q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length
):
    """jax's packed attention as cuDNN computes it: each sequence alone, anywhere in the batch, with
    what jax makes of its arguments."""
    assert mask_type is fused.MaskType.PADDING_CAUSAL
    assert kv_seqlen is q_seqlen
    assert kv_offsets is q_offsets
    assert q_offsets.shape[1] > 2  # else jax takes the rows for unpacked
    shape, longest = q.shape, q.shape[1]
    given = (q_seqlen, kv_seqlen, q_offsets, kv_offsets)
    keys = k if jax.__version_info__ >= (0, 11) else q  # see `cudnn._SHARED`
    lengths, _, *both = fused._fix_seqlen_offsets(*given, q, keys)
    starts, of_keys = (
        x.reshape(-1) // (y.shape[2] * y.shape[3]) for x, y in zip(both, (q, keys), strict=True)
    )
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    places = jnp.arange(len(q))
    slots = lengths.reshape(-1, 1)
    first, of_keys = (x[: len(slots), None] for x in (starts, of_keys))
    end = first + jnp.minimum(slots, longest)  # a slot has room for `longest` tokens
    inside = (places[None] >= first) & (places[None] < end) & (of_keys == first)
    number = jnp.max(jnp.where(inside, jnp.arange(len(slots))[:, None], -1), axis=0)
    distance = places[:, None] - places[None]
    seen = (number[:, None] == number[None]) & (distance >= 0) & (number >= 0)[:, None]
    if sliding_window_length is not None:
        seen &= distance < sliding_window_length
    scores = jnp.where(seen[None], scale * jnp.einsum("thd,shd->hts", q, k), -jnp.inf)
    out = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)
    # NaN where cuDNN writes nothing.
    return jnp.where((number >= 0)[:, None, None], out, jnp.nan).reshape(shape)


@pytest.mark.parametrize("runs", [None, Runs(8, 64), Runs(8, 32)])
@pytest.mark.parametrize(("shared", "window"), [(True, None), (False, None), (True, 20)])
def test_packed_form_gets_the_rows_sequences(window, shared, runs, monkeypatch):
    heads = []

    def kernel(q, k, v, **settings):
        heads.append((q.shape[2], k.shape[2], v.shape[2]))
        return by_sequence(q, k, v, **settings)

    monkeypatch.setattr(fused, "dot_product_attention", kernel)
    monkeypatch.setattr(cudnn, "_SHARED", shared)
    found = results(functools.partial(cudnn.packed, runs=runs), 64, 8, window=window)
    assert_equal(found, results(attention, 64, 8, window=window))
    assert set(heads) == {(4, 2, 2) if shared else (4, 4, 4)}


def row(*sizes: int) -> list[int]:
    """The segments of a row of 64: sequences of these sizes, a negative one for a gap."""
    found: list[int] = []
    for number, size in enumerate(sizes, start=1):
        found += [number if size > 0 else 0] * abs(size)
    return found + [0] * (64 - len(found))


SHORT_FIRST = row(*[1] * 16, 15, 3)  # most of its runs begin before the second half
ROWS = [
    [row(64), row(3)],
    [row(5, -3, 6, 1), SHORT_FIRST],
    [row(*[2] * 32), row(7, 8, 8, -1, 8, 32)],
    [row(), row(33)],
]


def packed(segments, runs):
    (q, k, v, _), _ = inputs(64, 8, 8, 2)
    settings = {"scoring": Scoring(None, 0.35), "precision": parse("fp32")}

    @jax.jit
    def both(*arrays):
        return cudnn.packed(*arrays, runs=runs, **settings), attention(*arrays, **settings)

    return both(q, k, v, segments)


@pytest.mark.parametrize("rows", ROWS)
def test_bounds_hold_all_runs_of_a_batch(rows, monkeypatch):
    monkeypatch.setattr(fused, "dot_product_attention", by_sequence)
    monkeypatch.setattr(bounds, "_SHORTEST", 8)
    segments = np.array(rows, np.int32)
    runs = bounds.bound_runs(segments)
    longest = max(np.bincount(one[one > 0]).max(initial=0) for one in segments)
    assert longest <= runs.longest < 2 * max(longest, 8)
    out, expected = packed(jnp.asarray(segments), runs)
    assert np.isfinite(out).all()  # padding, too
    real = segments > 0
    np.testing.assert_allclose(out[real], expected[real], atol=1e-5)


@pytest.mark.parametrize("runs", [None, Runs(32, 64), Runs(32, 32), Runs(16, 64)])
def test_rows_beyond_the_bounds_give_nan(runs, monkeypatch):
    monkeypatch.setattr(fused, "dot_product_attention", by_sequence)
    segments = jnp.asarray([np.arange(64), row(*[1] * 14, 32)], jnp.int32)
    out, _ = packed(segments, runs)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()
    long, _ = packed(jnp.asarray([row(33), row(32)], jnp.int32), Runs(4, 32))
    assert np.isnan(long[0]).all()
    assert np.isfinite(long[1]).all()


@pytest.mark.usefixtures("cudnn_by_xla")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}])
def test_the_mask_is_that_of_attention(sizes, window, monkeypatch):
    monkeypatch.setattr(kernels, "reserves_by_run", lambda *_: False)
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
    monkeypatch.setattr(kernels, "reserves_by_run", lambda *_: hopper)
    attend = kernels.by_kernel("cudnn", layout=layout())
    config = dataclasses.replace(tiny.CONFIG, windows=windows)
    model = decoder(config, remat=remat, attend=attend)
    precision = parse("bf16_master")
    params = abstract(model.specs, dtype=precision.params)
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
