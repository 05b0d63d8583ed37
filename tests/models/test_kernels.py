"""Every kernel, whole and cut over a mesh, equals attention on one device, gradients too."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import PRESETS as PRECISIONS, parse
from jaxrl.models.attention import kernels, splash, splash_gradient
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.visible import Tree
from jaxrl.models.model import decoder
from jaxrl.models.spec import abstract
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from jaxrl.sharding.traffic import collectives
from tests import tiny

FP32 = PRECISIONS["fp32"]
SINKS = jnp.asarray([-1.0, 0.5, 2.0, 0.0])
SCALE = 0.3  # of the scores, other than head_dim ** -0.5


def layout(**sizes) -> Layout:
    devices = jax.devices()[: math.prod(sizes.values())]
    return Layout(make_mesh(**sizes, devices=devices), PRESETS["all"])


@functools.cache
def inputs(length: int, head_dim: int, value_dim: int, rows: int):
    """Several sequences and padding in each row; 4 query heads, 2 key heads."""
    rng = np.random.default_rng(length)
    shapes = [(4, head_dim), (2, head_dim), (2, value_dim), (4, value_dim)]
    shapes = [(2, length, *shape) for shape in shapes]
    arrays = [jnp.asarray(rng.normal(size=shape)[:rows], jnp.float32) for shape in shapes]
    segments = np.sort(rng.integers(1, 4, (2, length)), axis=1)
    segments[:, -length // 8 :] = 0
    return arrays, jnp.asarray(segments[:rows], jnp.int32)


def results(attend, length: int, head_dim: int, *, window=None, cap=None, **more):
    """Output and gradients; what padding sees is nobody's business."""
    sizes = (more.get("value_dim", head_dim), more.get("rows", 2))
    (q, k, v, dout), segments = inputs(length, head_dim, *sizes)
    segments = more.get("segments", segments)
    real = (segments > 0)[:, :, None, None]

    @jax.jit
    def both(q, k, v, sinks):
        def call(q, k, v, sinks):
            scoring = Scoring(window, SCALE, cap, sinks)
            out = attend(q, k, v, segments, scoring=scoring, precision=FP32)
            return jnp.where(real, out, 0)

        out, backward = jax.vjp(call, q, k, v, sinks)
        return out, backward(dout)

    return jax.device_get(both(q, k, v, more.get("sinks")))


@functools.cache
def expected(length: int, head_dim: int):
    return results(attention, length, head_dim)


def assert_equal(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"context": 8},
        {"data": 2, "context": 2, "tensor": 2},
        {"fsdp": 2, "context": 4},
        {"data": 2, "context": 2},  # two heads of keys: devices exchange tokens for heads
    ],
)
def test_tokens_cut_over_devices_change_nothing(sizes):
    attend = kernels.by_kernel("xla", layout=layout(**sizes))
    assert_equal(results(attend, 64, 8), expected(64, 8))


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "context": 4}, {"fsdp": 2, "context": 2}])
def test_a_window_reaches_over_devices(sizes):
    attend = kernels.by_kernel("xla", layout=layout(**sizes))
    form = {"window": 20, "sinks": SINKS, "cap": 0.7, "value_dim": 4}
    assert_equal(results(attend, 64, 8, **form), results(attention, 64, 8, **form))


@pytest.mark.parametrize(
    ("sizes", "kv_heads", "sent"),
    [
        # What a device sends of queries, keys and values, and of the output and its gradients, for
        # its rows: all but its own part of it.
        ({"data": 2, "context": 2}, 2, 1 / 2),
        ({"data": 2, "context": 2, "tensor": 2}, 4, 1 / 2),
        ({"context": 4}, 4, 3 / 4),
    ],
)
def test_devices_send_only_their_part_of_a_row(sizes, kv_heads, sent):
    there, length, size = layout(**sizes), 64, 8
    attend, parts = kernels.by_kernel("xla", layout=there), there.mesh.size
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, length, heads, size)), jnp.float32)
        for heads in (2 * kv_heads, kv_heads, kv_heads)
    )
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, length)), axis=1), jnp.int32)
    scoring = Scoring(None, SCALE)

    def gradient(attend, *arrays):
        def total(q, k, v):
            return jnp.sum(jnp.sin(attend(q, k, v, segments, scoring=scoring, precision=FP32)))

        return jax.grad(total, argnums=(0, 1, 2))(*arrays)

    cuts = [there.batch(("batch", "length", heads)) for heads in ("q_heads", "kv_heads")]
    given = (cuts[0], cuts[1], cuts[1])
    step = jax.jit(functools.partial(gradient, attend), in_shardings=given, out_shardings=given)
    assert_equal(step(q, k, v), jax.jit(functools.partial(gradient, attention))(q, k, v))
    traffic = collectives(step.lower(q, k, v).compile().as_text() or "")
    once = (2 * q.nbytes + k.nbytes + v.nbytes) / parts  # of the forward pass; q as the output
    assert traffic["all-to-all"].sent == pytest.approx(2 * sent * once)
    others = sum(one.sent for kind, one in traffic.items() if kind != "all-to-all")
    assert others <= 2 * segments.nbytes


def test_no_empty_array_enters_a_shard_map():
    """jaxlib 0.11 crashes there while it compiles, even if tests run with an older one."""
    (q, k, v, _), segments = inputs(64, 8, 8, 2)
    attend = kernels.by_kernel("xla", layout=layout(context=8))
    scoring = Scoring(None, SCALE)
    call = functools.partial(attend, segments=segments, scoring=scoring, precision=FP32)
    gradient = jax.grad(lambda *x: call(*x).sum(), argnums=(0, 1, 2))
    assert "tensor<0x" not in jax.jit(gradient).lower(q, k, v).as_text()


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}])
def test_splash_attention_in_interpret_mode(sizes):
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, 256, 128), expected(256, 128))


@pytest.fixture
def one_kernel(monkeypatch):
    """All gradients are of one kernel, with blocks of 128."""
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(splash_gradient, "_FAST", {kind: 96})
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
def test_splash_attention_with_one_kernel_for_all_gradients(sizes, form, one_kernel):
    settings: Any = {"length": 256, "head_dim": 128} | form
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, **settings), results(attention, **settings))


def test_one_kernel_skips_what_no_query_sees_and_masks_no_more_than_it_must(one_kernel):
    segments = np.repeat([[1, 2, 0], [1, 1, 1]], [256, 200, 56], axis=1).astype(np.int32)
    pairs = functools.partial(
        splash_gradient._pairs, splash_gradient.Tokens(segments, segments, jnp.int32(0))
    )
    i, j = np.arange(512)[None, :, None], np.arange(512)[None, None, :]
    for window in (None, 150):
        seen = (j <= i) & (segments[:, :, None] == segments[:, None, :])
        if window is not None:
            seen &= i - j < window
        blocks = seen.reshape(2, 4, 128, 4, 128)
        wanted = np.where(blocks.all((2, 4)), 2, np.where(blocks.any((2, 4)), 1, 0))
        found = pairs(splash_gradient.Settings(128, window, None))
        np.testing.assert_array_equal(found, wanted.swapaxes(1, 2))

    attend = kernels.by_kernel("splash", layout=layout(), interpret=True)
    form: Any = {"length": 512, "head_dim": 128, "segments": jnp.asarray(segments)}
    assert_equal(results(attend, **form), results(attention, **form))


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
    assert splash_gradient.fits(kind, **sizes) == one


def test_a_decoder_gets_what_the_devices_have():
    here = {"layout": layout(), "config": tiny.CONFIG}
    assert_equal(results(kernels.attend_by("auto", **here), 64, 8), expected(64, 8))
    with pytest.raises(ValueError, match=r"'cudnn' is for NVIDIA GPUs, .* 'cpu'; use 'auto' or"):
        results(kernels.attend_by("cudnn", **here), 64, 8)


@pytest.mark.parametrize("fast", [0, 96])
@pytest.mark.parametrize(("remat", "forward"), [("attention", 1), ("layer", 2)])
def test_what_is_kept_of_splash_spares_its_forward_kernel(remat, forward, fast, monkeypatch):
    monkeypatch.setattr(splash_gradient, "_FAST", {jax.devices()[0].device_kind: fast})
    attend = kernels.by_kernel("splash", layout=layout(), interpret=True)
    model = decoder(tiny.CONFIG, remat=remat, attend=attend)
    tokens = jnp.ones((2, 128), jnp.int32)
    params = abstract(model.specs, dtype=jnp.bfloat16)

    def loss(params):
        out = model.hidden(params, tokens, tokens, tokens, precision=parse("bf16_master"))
        return jnp.sum(out.astype(jnp.float32))

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert text.count("name=splash_mha_fwd_segmented_residuals") == forward
    assert text.count("name=splash_mha_gradients") == (fast > 0)
    assert "reduce_precision" not in text  # a pass of its own on TPUs


def test_indivisible_heads_are_an_error():
    attend = kernels.by_kernel("splash", layout=layout(data=2, tensor=4), interpret=True)
    with pytest.raises(ValueError, match=r"'kv_heads' has size 2, .* 4 devices \(tensor=4\)"):
        results(attend, 256, 128)


class Device(NamedTuple):
    """Of a platform that is not here."""

    platform: str
    compute_capability: str = ""


def kernels_there(device, monkeypatch, *, precision="bf16_master", length=1024, **sizes):
    class Mesh:
        devices = np.array([None])

    Mesh.devices[0] = device
    there = layout()
    object.__setattr__(there, "mesh", Mesh)
    monkeypatch.setattr(Layout, "count", lambda self, axis: 1)
    config = dataclasses.replace(tiny.CONFIG, **{"head_dim": 128} | sizes)
    return functools.partial(
        kernels.choose_kernel,
        layout=there,
        config=config,
        precision=parse(precision),
        length=length,
    )


CPU, TPU = Device("cpu"), Device("tpu")
A100, H100 = Device("gpu", "8.0"), Device("gpu", "9.0")


def test_only_splash_rounds_keys_times_the_factor_of_the_scores(monkeypatch):
    there = kernels_there(TPU, monkeypatch).keywords
    here = {"layout": there["layout"], "config": there["config"]}
    segments = jnp.ones((1, 1024), jnp.int32)

    def rounds(attend, rows=segments, precision="bf16_master"):
        return kernels.rounds_scaled_keys(attend, rows, 1024, parse(precision))

    auto = kernels.attend_by("auto", **here)
    assert rounds(auto)
    assert not rounds(auto, Tree(segments, segments))
    assert not rounds(auto, precision="fp32")
    assert not rounds(kernels.attend_by("xla", **here))
    assert not rounds(attention)


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        (CPU, {}, "xla"),
        (TPU, {}, "splash"),
        (TPU, {"windows": (300, 300)}, "splash"),
        (TPU, {"windows": (300, None)}, "splash"),
        (TPU, {"precision": "fp16_master"}, "xla"),
        (TPU, {"score_cap": 50.0}, "splash"),
        (TPU, {"sinks": True}, "splash"),
        (H100, {"score_cap": 50.0}, "xla"),
        (H100, {"sinks": True}, "xla"),
        (TPU, {"head_dim": 64}, "splash"),
        (TPU, {"length": 1000}, "xla"),
        (A100, {"precision": "fp16_master", "length": 1000}, "cudnn"),
        (A100, {"head_dim": 256}, "xla"),
        (H100, {"head_dim": 256, "windows": (300, 300)}, "cudnn"),
        (H100, {"precision": "fp32"}, "xla"),
    ],
)
def test_the_kernel_follows_the_devices(device, settings, expected, monkeypatch):
    chosen = kernels_there(device, monkeypatch, **settings)
    assert chosen("auto") == expected
    assert chosen("xla") == "xla"
    others: list[kernels.Kernel] = [name for name in ("splash", "cudnn") if name != expected]
    for wanted in others:
        with pytest.raises(
            ValueError, match=f"train.attention = '{wanted}' .*; use 'auto' or 'xla'"
        ):
            chosen(wanted)


@pytest.mark.parametrize("to", ["segments", "shared prefixes"])
def test_wrong_kernel_is_refused(to, monkeypatch):
    settings = {"layout": layout(), "config": tiny.CONFIG, "precision": parse("bf16_master")}
    monkeypatch.setattr(kernels, "by_kernel", lambda *_, **__: attention)
    kernels.verify_kernel("cudnn", **settings)

    def blind(q, k, v, segments, **kwargs):
        if not isinstance(segments, Tree):
            segments = segments if to != "segments" else jnp.ones_like(segments)
        elif to == "shared prefixes":
            segments = segments._replace(seen_until=jnp.full_like(segments.seen_until, 512))
        return attention(q, k, v, segments, **kwargs)

    monkeypatch.setattr(kernels, "by_kernel", lambda *_, **__: blind)
    with pytest.raises(RuntimeError, match=r"attention by cudnn differs from XLA's by .*'xla'"):
        kernels.verify_kernel("cudnn", **settings)
