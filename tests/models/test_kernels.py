"""Every kernel, whole and cut over a mesh, equals attention on one device, gradients too."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import PRESETS as PRECISIONS, parse
from jaxrl.models.attention import kernels
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.visible import Tree
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.traffic import collectives
from tests import tiny
from tests.models.attending import SCALE, SINKS, assert_equal, expected, inputs, layout, results

FP32 = PRECISIONS["fp32"]


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


def test_a_decoder_gets_what_the_devices_have():
    here = {"layout": layout(), "config": tiny.CONFIG}
    assert_equal(results(kernels.attend_by("auto", **here), 64, 8), expected(64, 8))
    with pytest.raises(ValueError, match=r"'cudnn' is for NVIDIA GPUs, .* 'cpu'; use 'auto' or"):
        results(kernels.attend_by("cudnn", **here), 64, 8)


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
