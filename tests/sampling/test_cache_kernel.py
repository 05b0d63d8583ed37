"""Decoding's attention on NVIDIA GPUs, in Pallas' interpreter on CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.half_bits import to_bits
from jaxrl.core.precision import parse
from jaxrl.models.attention.scores import Scoring
from jaxrl.sampling.embedded import cache_kernel
from jaxrl.sampling.embedded.cache_kernel import Settings
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS

ROWS, KV_HEADS, GROUPS, SLOTS, DIM, VALUE_DIM = 2, 2, 3, 300, 24, 40
LAYER, POSITIONS = 1, (2, 299)


def reference(q, keys, values, sinks, *, window, scale, cap):
    """One query of one head in f64, by the definition."""
    scores = keys @ q * scale
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    weights = np.exp(scores)
    weights[: 0 if window is None else max(0, len(keys) - window)] = 0
    return weights @ values / (weights.sum() + (0 if sinks is None else np.exp(sinks)))


@pytest.mark.parametrize(
    ("text", "kind", "sinks"),
    [
        ("fp32", {"window": None, "scale": 0.2, "cap": None}, False),
        ("bf16_master", {"window": 190, "scale": 0.3, "cap": 2.0}, True),
        ("fp16_master", {"window": None, "scale": 0.2, "cap": None}, True),
    ],
)
def test_kernel_averages_the_values_that_a_token_sees(monkeypatch, text, kind, sinks):
    """On two devices for the rows and two for the heads; two programs share the slots of a row."""
    precision, rng = parse(text), np.random.default_rng(0)
    seen = np.arange(SLOTS) <= np.array(POSITIONS)[:, None]

    def cache(size):
        held = rng.normal(size=(2, ROWS, KV_HEADS, SLOTS, size))
        held = np.where(seen[None, :, None, :, None], held, np.nan)  # other slots are not read
        return jnp.asarray(held, precision.compute)

    q = jnp.asarray(rng.normal(size=(ROWS, 1, KV_HEADS * GROUPS, DIM)), precision.compute)
    keys, values = cache(DIM), cache(VALUE_DIM)
    per_head = rng.normal(size=KV_HEADS * GROUPS) if sinks else None
    scoring = Scoring(
        **kind, sinks=None if per_head is None else jnp.asarray(per_head, jnp.float32)
    )
    monkeypatch.setattr(cache_kernel, "Settings", partial(Settings, interpret=True))
    monkeypatch.setattr(cache_kernel, "_FEWEST", 150)
    layout = Layout(make_mesh(data=2, tensor=2, devices=jax.devices()[:4]), PRESETS["tensor"])
    attend = partial(cache_kernel.attend, scoring=scoring, precision=precision, local=layout.local)
    positions = jnp.array(POSITIONS, jnp.int32)[:, None]
    found = jax.jit(attend)(q, to_bits(keys), to_bits(values), jnp.int32(LAYER), positions)
    assert found.dtype == precision.activations
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    bound = 8 * float(jnp.finfo(precision.compute).eps)
    for row, head in np.ndindex(ROWS, KV_HEADS * GROUPS):
        held = (x[LAYER, row, head // GROUPS, : POSITIONS[row] + 1] for x in (keys, values))
        sink = None if per_head is None else per_head[head]
        expected = reference(q[row, 0, head], *held, sink, **kind)
        np.testing.assert_allclose(found[row, 0, head], expected, rtol=bound, atol=bound)
