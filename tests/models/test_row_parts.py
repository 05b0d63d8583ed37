"""Devices that have parts of rows: the output layer computes each position once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.kept import Kept, encode, most_kept
from jaxrl.core.precision import parse
from jaxrl.models.head_chunks import Chunk
from jaxrl.models.logprobs import token_logprobs_and_entropy
from jaxrl.models.output_layer import Head
from jaxrl.models.row_parts import Rows
from jaxrl.sharding.memory import program_work
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from jaxrl.sharding.traffic import collectives

FP32 = parse("fp32")
BATCH, LENGTH, WIDTH, VOCAB = 4, 64, 8, 48
CHUNK = Chunk(vocab=24)


@functools.cache
def inputs():
    """Hidden states, weights, and tokens with a mask that leaves out some parts of rows."""
    rng = np.random.default_rng(0)
    hidden, weights = (rng.normal(size=s) for s in ((BATCH, LENGTH, WIDTH), (VOCAB, WIDTH)))
    mask = rng.random((BATCH, LENGTH)) < 0.6
    mask[1], mask[2], mask[3, :40] = False, True, False
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH))
    ids = rng.integers(0, VOCAB, (BATCH, LENGTH, most_kept(VOCAB)))
    ids[..., 0] = tokens
    kept = Kept(encode(jnp.asarray(ids), VOCAB), jnp.asarray(rng.random(tokens.shape) < 0.5))
    return *(jnp.asarray(x, jnp.float32) for x in (hidden, weights)), tokens, mask, kept


def scored(hidden, weights, *, rows: Rows, truncated: bool):
    """Scores, and the gradients of a sum in which each has a weight of its own."""
    tokens, mask, kept = (jax.tree.map(jnp.asarray, x) for x in inputs()[2:])

    def loss(hidden, weights):
        found = token_logprobs_and_entropy(
            hidden,
            Head(weights, temperature=0.7, rows=rows),
            tokens,
            mask,
            precision=FP32,
            chunk=CHUNK,
            kept=kept if truncated else None,
        )
        factors = jnp.sin(jnp.arange(2 * tokens.size)).reshape(2, *tokens.shape)
        return jnp.sum(jnp.stack(found) * factors), found

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, weights)


@pytest.mark.parametrize(
    ("sizes", "truncated"),
    [
        ({"context": 8}, False),
        ({"data": 2, "context": 4}, True),
        ({"fsdp": 2, "context": 2, "tensor": 2}, False),
    ],
)
def test_each_position_is_computed_on_one_device(sizes, truncated):
    layout = Layout(make_mesh(**sizes), PRESETS["all"])
    run = functools.partial(scored, truncated=truncated)
    alone = jax.jit(functools.partial(run, rows=Rows()))
    cut = layout.batch(("batch", "length"))
    there = jax.jit(
        functools.partial(run, rows=Rows(layout)), in_shardings=(cut, layout.batch(("vocab",)))
    )
    given = inputs()[:2]
    for a, b in zip(*(jax.tree.leaves(f(*given)) for f in (there, alone)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    texts = [f.lower(*given).compile().as_text() or "" for f in (there, alone)]
    work, whole = (sum(one.flops for one in program_work(t, trips=[4, 4])) for t in texts)
    assert work == pytest.approx(whole / 8, rel=0.02)
    moved = collectives(texts[0], trips=[4, 4]).items()
    hidden = given[0].nbytes / 8
    assert sum(x.sent for kind, x in moved if kind in ("all-gather", "all-to-all")) < hidden
