"""The output layer's kernels for NVIDIA GPUs, in Pallas' interpreter on CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl.core.precision import parse
from jaxrl.models import head_kernel
from jaxrl.models.head_kernel import Settings
from jaxrl.models.logprobs import token_logprobs_and_entropy
from jaxrl.models.output_layer import Head
from jaxrl.models.row_parts import Rows
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS

BATCH, LENGTH, WIDTH, VOCAB = 2, 100, 128, 384  # the last block of positions is not full


def results(temperature, layout=None, rank=None):
    precision, rng = parse("bf16_master"), np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(BATCH, LENGTH, WIDTH + (rank or 0))), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)) / 4, jnp.bfloat16)
    adapter = rank and jnp.asarray(rng.normal(size=(VOCAB, rank)) / 4, jnp.bfloat16)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (BATCH, LENGTH)))
    mask = jnp.asarray(rng.random((BATCH, LENGTH)) < 0.9)
    cotangents = jnp.asarray(rng.normal(size=(2, BATCH, LENGTH)), jnp.float32)

    def scores(hidden, trained):
        head = Head(trained if rank is None else weights, None, temperature, Rows(layout))
        head = head if rank is None else head._replace(adapter=trained)
        return jnp.stack(
            token_logprobs_and_entropy(hidden, head, tokens, mask, precision=precision)
        )

    found, backward = jax.vjp(scores, hidden, weights if rank is None else adapter)
    return [np.asarray(x, np.float64) for x in (found, *backward(cotangents))]


@pytest.mark.parametrize(("temperature", "devices", "rank"), [(1.0, 1, 16), (0.7, 2, None)])
def test_scores_and_gradients_equal_those_of_products(temperature, devices, rank, monkeypatch):
    """On two devices each has a row. An adapter is a part of a block."""
    layout = Layout(make_mesh(data=devices, devices=jax.devices()[:devices]), PRESETS["all"])
    expected = results(temperature, rank=rank)
    called = []

    def for_cuda(*operands, cuda=None, default=None, **_):
        called.append(cuda)
        return (cuda or default)(*operands)

    monkeypatch.setattr(Rows, "platform", "gpu")
    monkeypatch.setattr(head_kernel, "Settings", functools.partial(Settings, interpret=True))
    monkeypatch.setattr(lax, "platform_dependent", for_cuda)
    found = results(temperature, layout, rank)
    assert any(called)
    # The same roundings, after sums in another order.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(found[1:], expected[1:], strict=True):
        error = np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted)
        assert error < 2**-8


@pytest.mark.parametrize(
    ("text", "vocab", "supported"),
    [
        ("bf16_master", VOCAB, True),
        ("fp16_master", VOCAB, True),
        ("fp32", VOCAB, False),
        ("bf16_master,logits=bf16", VOCAB, False),
        ("bf16_master,sums=fixed", VOCAB, False),
        ("bf16_master", VOCAB + 1, False),
        ("bf16_master", 2**24, False),  # too many weights for offsets of 32 bits
    ],
)
def test_other_policies_and_sizes_are_left_to_products(text, vocab, supported):
    h, weights = (jax.ShapeDtypeStruct((n, WIDTH), jnp.bfloat16) for n in (LENGTH, vocab))
    assert head_kernel.supports(h, weights, parse(text)) == supported
