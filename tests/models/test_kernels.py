"""Every kernel, whole and cut over a mesh, equals attention on one device, gradients too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import PRESETS as PRECISIONS
from jaxrl.core.precision import parse
from jaxrl.models import kernels
from jaxrl.models.attention import attention
from sharding.mesh import make_mesh
from sharding.partition import Layout
from sharding.rules import PRESETS
from tests import tiny

FP32 = PRECISIONS["fp32"]


def layout(**sizes) -> Layout:
    devices = None if sizes else jax.devices()[:1]
    return Layout(make_mesh(**sizes, devices=devices), PRESETS["all"])


@functools.cache
def inputs(length: int, head_dim: int):
    """Two rows, several sequences and padding in each; 4 query heads, 2 key heads."""
    rng = np.random.default_rng(length)
    shapes = [(2, length, heads, head_dim) for heads in (4, 2, 2, 4)]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    segments = np.sort(rng.integers(1, 4, (2, length)), axis=1)
    segments[:, -length // 8 :] = 0
    return arrays, jnp.asarray(segments, jnp.int32)


def results(attend, length: int, head_dim: int, *, window=None):
    """Output and gradients; what padding sees is nobody's business."""
    (q, k, v, dout), segments = inputs(length, head_dim)
    real = (segments > 0)[:, :, None, None]

    @jax.jit
    def both(q, k, v):
        call = functools.partial(attend, window=window, precision=FP32)
        out, backward = jax.vjp(lambda *x: jnp.where(real, call(*x, segments), 0), q, k, v)
        return out, backward(dout)

    return jax.device_get(both(q, k, v))


@functools.cache
def expected(length: int, head_dim: int):
    return results(attention, length, head_dim)


def assert_equal(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)


@pytest.mark.parametrize(
    "sizes", [{"context": 8}, {"data": 2, "context": 2, "tensor": 2}, {"fsdp": 2, "context": 4}]
)
def test_tokens_cut_over_devices_change_nothing(sizes):
    attend = kernels.by_kernel("xla", layout=layout(**sizes))
    assert_equal(results(attend, 64, 8), expected(64, 8))


def test_a_window_reaches_over_devices():
    attend = kernels.by_kernel("xla", layout=layout(fsdp=2, context=4))
    window = jnp.int32(20)
    assert_equal(results(attend, 64, 8, window=window), results(attention, 64, 8, window=window))


def test_no_empty_array_enters_a_shard_map():
    """jaxlib 0.11 crashes there while it compiles, even if tests run with an older one."""
    (q, k, v, _), segments = inputs(64, 8)
    attend = kernels.by_kernel("xla", layout=layout(context=8))
    call = functools.partial(attend, segments=segments, window=None, precision=FP32)
    gradient = jax.grad(lambda *x: call(*x).sum(), argnums=(0, 1, 2))
    assert "tensor<0x" not in jax.jit(gradient).lower(q, k, v).as_text()


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}])
def test_splash_attention_in_interpret_mode(sizes):
    attend = kernels.by_kernel("splash", layout=layout(**sizes), interpret=True)
    assert_equal(results(attend, 256, 128), expected(256, 128))


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}])
def test_what_cudnn_is_asked_for(sizes, monkeypatch):
    """jax.nn.dot_product_attention by XLA, with the same arguments."""
    local = functools.partial(kernels._library, implementation="xla")
    monkeypatch.setitem(kernels._LOCAL, "cudnn", local)
    attend = kernels.by_kernel("cudnn", layout=layout(**sizes))
    assert_equal(results(attend, 64, 8), expected(64, 8))


def test_a_decoder_gets_what_the_devices_have():
    here = {"layout": layout(), "config": tiny.CONFIG}
    assert_equal(results(kernels.attend("auto", **here), 64, 8), expected(64, 8))
    with pytest.raises(ValueError, match=r"'cudnn' is for NVIDIA GPUs, .* 'cpu'; use 'auto' or"):
        results(kernels.attend("cudnn", **here), 64, 8)


def test_heads_that_do_not_divide_are_an_error_with_numbers():
    attend = kernels.by_kernel("splash", layout=layout(data=2, tensor=4), interpret=True)
    with pytest.raises(ValueError, match=r"'kv_heads' has size 2, .* 4 devices \(tensor=4\)"):
        results(attend, 256, 128)


class Device:
    """Of a platform that is not here."""

    def __init__(self, platform: str):
        self.platform = platform


@pytest.mark.parametrize(
    ("platform", "precision", "head_dim", "length", "expected"),
    [
        ("cpu", "bf16_master", 128, 1024, "xla"),
        ("tpu", "bf16_master", 128, 1024, "splash"),
        ("tpu", "fp16_master", 128, 1024, "xla"),
        ("tpu", "bf16_master", 64, 1024, "xla"),
        ("tpu", "bf16_master", 128, 1000, "xla"),
        ("gpu", "fp16_master", 128, 1000, "cudnn"),
        ("gpu", "fp32", 128, 1024, "xla"),
    ],
)
def test_the_kernel_follows_the_devices(
    platform, precision, head_dim, length, expected, monkeypatch
):
    class Mesh:
        devices = np.array([Device(platform)])

    there = layout()
    object.__setattr__(there, "mesh", Mesh)
    monkeypatch.setattr(Layout, "count", lambda self, axis: 1)
    config = dataclasses.replace(tiny.CONFIG, head_dim=head_dim)
    chosen = functools.partial(
        kernels.choose, layout=there, config=config, precision=parse(precision), length=length
    )
    assert chosen("auto") == expected
    assert chosen("xla") == "xla"
    for wanted in {"splash", "cudnn"} - {expected}:
        with pytest.raises(ValueError, match=f"attention = '{wanted}' .*; use 'auto' or 'xla'"):
            chosen(wanted)
