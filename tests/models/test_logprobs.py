import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

from jaxrl.core.kept import Kept, encode, most_kept
from jaxrl.core.precision import PRESETS as PRECISIONS, parse
from jaxrl.models.head_chunks import Chunk, chunk_sizes
from jaxrl.models.logprobs import token_logprobs, token_logprobs_and_entropy
from jaxrl.models.output_layer import Head
from jaxrl.models.row_parts import Rows
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from jaxrl.sharding.traffic import collectives

F64 = parse("fp32,compute=f64,activations=f64,logits=f64")
FP32 = parse("fp32")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def inputs(*, batch=4, length=19, width=6, vocab=23, seed=0, dtype=np.float64):
    """hidden, unembedding, tokens, a random mask with an empty row, cotangents."""
    rng = np.random.default_rng(seed)
    mask = rng.random((batch, length)) < 0.5
    mask[1] = False
    mask[2] = True
    return (
        jnp.asarray(rng.normal(size=(batch, length, width)), dtype),
        jnp.asarray(rng.normal(size=(vocab, width)), dtype),
        jnp.asarray(rng.integers(0, vocab, (batch, length))),
        jnp.asarray(mask),
        jnp.asarray(rng.normal(size=(2, batch, length)), dtype),
    )


def reference(hidden, unembedding, tokens, mask, *, temperature, cap=None):
    """All logits at once."""
    logits = jnp.einsum("btd,vd->btv", hidden[:, :-1], unembedding)
    logits = (logits if cap is None else cap * jnp.tanh(logits / cap)) / temperature
    logp = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[:, :, 0]
    scores = jnp.stack([chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)])
    return jnp.pad(jnp.where(mask[None, :, 1:], scores, 0), ((0, 0), (0, 0), (1, 0)))


def value_and_grad(scores, hidden, unembedding, cotangents):
    """Scores and the gradients of their product with the cotangents, compiled."""

    def loss(hidden, unembedding):
        values = scores(hidden, unembedding)
        return jnp.sum(jnp.stack(values) * cotangents[: len(values)]), values

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, values), gradients = compiled(hidden, unembedding)
    return np.asarray(values), gradients


@pytest.mark.parametrize(
    ("vocab", "chunk", "cap"),
    [
        (24, Chunk(positions=None, vocab=16384), None),  # one chunk
        (24, Chunk(positions=5, vocab=7), 1.5),  # chunks of 6, tokens left over
        (23, Chunk(positions=4, vocab=5), 1.5),  # a prime: the vocabulary is padded
        (23, Chunk(positions=1000, vocab=1), None),
    ],
)
def test_equals_log_softmax_of_all_logits(x64, vocab, chunk, cap):
    hidden, unembedding, tokens, mask, cotangents = inputs(vocab=vocab)
    ours = value_and_grad(
        lambda h, w: token_logprobs_and_entropy(
            h, Head(w, cap, 0.7), tokens, mask, precision=F64, chunk=chunk
        ),
        hidden,
        unembedding,
        cotangents,
    )
    expected = value_and_grad(
        lambda h, w: reference(h, w, tokens, mask, temperature=0.7, cap=cap),
        hidden,
        unembedding,
        cotangents,
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), ours, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_for_gpus_change_nothing(x64, temperature, monkeypatch):
    hidden, unembedding, tokens, mask, cotangents = inputs()

    def ours(h, w):
        head = Head(w, None, temperature)
        return token_logprobs_and_entropy(h, head, tokens, mask, precision=F64)

    expected = value_and_grad(ours, hidden, unembedding, cotangents)
    monkeypatch.setattr(Rows, "platform", "gpu")
    found = value_and_grad(ours, hidden, unembedding, cotangents)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), found, expected)


def test_chunks_of_gpus_have_the_whole_vocabulary(monkeypatch):
    sizes = functools.partial(chunk_sizes, vocab_size=151_936, division=Rows(), chunk=Chunk())
    assert sizes(1, 8192) == (2048, 16_384)
    monkeypatch.setattr(Rows, "platform", "gpu")
    assert sizes(6, 1280) == (320, 151_936)
    positions, _ = sizes(2, 32_768)
    assert 2**30 < 4 * 2 * positions * 151_936 < 1.6e9  # bytes of the logits in f32


@pytest.mark.parametrize("chunk", [Chunk(), Chunk(positions=4, vocab=5)], ids=["whole", "chunks"])
def test_kept_tokens_are_the_whole_distribution(x64, chunk):
    """Log-probs, entropies and gradients are those of a softmax over a token's own set."""
    hidden, unembedding, tokens, mask, cotangents = inputs()
    vocab, rng = len(unembedding), np.random.default_rng(1)
    ids = rng.integers(0, vocab, (*tokens.shape, most_kept(vocab))) % 7 * 3 % vocab
    ids[..., 0] = tokens
    drawn = rng.random(tokens.shape) < 0.8
    allowed = np.any(ids[..., None] == np.arange(vocab), axis=-2) | ~drawn[..., None]
    kept = Kept(encode(jnp.asarray(ids), vocab), jnp.asarray(drawn))
    assert 2 < allowed[drawn].sum(axis=-1).mean() < 9

    def ours(h, w):
        return token_logprobs_and_entropy(
            h, Head(w, 1.5, 0.7), tokens, mask, precision=F64, chunk=chunk, kept=kept
        )

    def brute(h, w):
        logits = 1.5 * jnp.tanh(jnp.einsum("btd,vd->btv", h[:, :-1], w) / 1.5) / 0.7
        logp = jax.nn.log_softmax(jnp.where(allowed[:, 1:], logits, -1e30))
        chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[:, :, 0]
        entropy = -jnp.sum(jnp.where(allowed[:, 1:], jnp.exp(logp) * logp, 0), axis=-1)
        scores = jnp.where(mask[None, :, 1:], jnp.stack([chosen, entropy]), 0)
        return jnp.pad(scores, ((0, 0), (0, 0), (1, 0)))

    found, expected = (
        value_and_grad(one, hidden, unembedding, cotangents) for one in (ours, brute)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), found, expected)
    check_grads(jax.jit(ours), (hidden, unembedding), order=1, modes=["rev"])


def test_one_pass_of_gpus_equals_log_softmax(x64, monkeypatch):
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *args, default, **others: others.get("cuda", default)(*args),
    )
    test_equals_log_softmax_of_all_logits(x64, 23, Chunk(positions=4, vocab=5), 1.5)


def test_entropy_is_optional(x64):
    hidden, unembedding, tokens, mask, cotangents = inputs()

    def logprobs(h, w):
        return (token_logprobs(h, Head(w), tokens, mask, precision=F64),)

    def first_of_both(h, w):
        return token_logprobs_and_entropy(h, Head(w), tokens, mask, precision=F64)[:1]

    ours, expected = (
        value_and_grad(scores, hidden, unembedding, cotangents)
        for scores in (logprobs, first_of_both)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.parametrize("name", ["fp32", "bf16_master"])
def test_entropy_leaves_the_bits_of_the_logprobs(name):
    """Those of the shadow, which has an entropy, are compared with those of the score."""
    precision, rng = PRECISIONS[name], np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(8, 96, 64)), precision.activations)
    head = Head(jnp.asarray(rng.normal(size=(97, 64)) * 0.05, precision.compute))
    tokens, mask = jnp.asarray(rng.integers(0, 97, (8, 96))), jnp.asarray(rng.random((8, 96)) < 0.7)
    tokens = tokens.astype(jnp.int32)
    alone, both = (
        jax.jit(functools.partial(scores, tokens=tokens, mask=mask, precision=precision))
        for scores in (token_logprobs, token_logprobs_and_entropy)
    )
    np.testing.assert_array_equal(alone(hidden, head), both(hidden, head)[0])


def test_gradients_are_those_of_the_values(x64):
    hidden, unembedding, tokens, mask, _ = inputs(batch=3, length=5, width=3, vocab=7)
    scores = jax.jit(
        lambda h, w: token_logprobs_and_entropy(
            h, Head(w, 2.0, 1.3), tokens, mask, precision=F64, chunk=Chunk(2, 4)
        )
    )
    check_grads(scores, (hidden, unembedding), order=1, modes=["rev"])


def test_whatever_stands_outside_the_mask_changes_nothing():
    hidden, unembedding, tokens, mask, cotangents = inputs(dtype=np.float32)
    used = jnp.roll(mask.at[:, 0].set(False), -1, axis=1)

    def scores(mask):
        return lambda h, w: token_logprobs_and_entropy(
            h, Head(w), tokens, mask, precision=FP32, chunk=Chunk(4, 8)
        )

    clean = value_and_grad(scores(mask), hidden, unembedding, cotangents)
    holes = jnp.where(used[:, :, None], hidden, jnp.nan)
    jax.tree.map(
        np.testing.assert_array_equal,
        clean,
        value_and_grad(scores(mask), holes, unembedding, cotangents),
    )
    nothing = value_and_grad(scores(mask & False), hidden * jnp.nan, unembedding, cotangents)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), nothing)


def test_no_logprob_is_above_zero():
    """A token that is certain has log-prob 0, not a rounding error more."""
    hidden = jnp.full((1, 3, 1), 1e4, jnp.float32)
    unembedding = jnp.asarray([[1.0], [0.3], [-7.0], [1.1]])
    tokens = jnp.full((1, 3), 3)
    logprobs, entropy = token_logprobs_and_entropy(
        hidden, Head(unembedding), tokens, tokens == 3, precision=FP32, chunk=Chunk(1, 2)
    )
    np.testing.assert_array_equal(logprobs, np.zeros((1, 3)))
    np.testing.assert_array_equal(entropy, np.zeros((1, 3)))


def test_temperature():
    hidden, unembedding, tokens, mask, _ = inputs(dtype=np.float32)
    score = jax.jit(
        lambda h, t: token_logprobs(
            h, Head(unembedding, temperature=t), tokens, mask, precision=FP32
        )
    )
    np.testing.assert_allclose(score(hidden, 0.5), score(hidden * 2, 1.0), rtol=1e-6)
    assert jax.grad(lambda t: score(hidden, t).sum())(0.5) == 0
    for temperature in (0, -1.0, float("nan")):
        head = Head(unembedding, temperature=temperature)
        with pytest.raises(ValueError, match=f"temperature={temperature} must be positive"):
            token_logprobs(hidden, head, tokens, mask, precision=FP32)
    with pytest.raises(ValueError, match=r"chunk=.*positions=0"):
        token_logprobs(hidden, Head(unembedding), tokens, mask, precision=FP32, chunk=Chunk(0, 1))


@pytest.mark.parametrize(("name", "epsilon"), [("bf16_master", 2.0**-8), ("fp16_master", 2.0**-11)])
def test_half_precision_rounds_operands_and_nothing_else(name, epsilon):
    precision = parse(name)
    hidden, unembedding, tokens, mask, cotangents = inputs(width=64, vocab=50, dtype=np.float32)
    hidden = hidden.astype(precision.activations)
    unembedding = unembedding.astype(precision.compute)
    values, gradients = value_and_grad(
        lambda h, w: token_logprobs_and_entropy(
            h, Head(w), tokens, mask, precision=precision, chunk=Chunk(4, 16)
        ),
        hidden,
        unembedding,
        cotangents,
    )
    expected, exact = value_and_grad(
        lambda h, w: reference(h, w, tokens, mask, temperature=1.0),
        hidden.astype(jnp.float32),
        unembedding.astype(jnp.float32),
        cotangents,
    )
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, atol=1e-4)  # products of halves are exact in f32
    for ours, theirs, operand in zip(gradients, exact, (hidden, unembedding), strict=True):
        assert ours.dtype == operand.dtype
        ours = np.asarray(ours, np.float32)
        # The gradient of a logit is rounded before its product and the result after it.
        assert np.abs(ours - theirs).max() < 3 * epsilon * np.abs(theirs).max()


def test_logits_dtype_rounds_the_result():
    hidden, unembedding, tokens, mask, _ = inputs(dtype=np.float32)
    coarse = parse("fp32,logits=bf16")
    ours = token_logprobs(
        hidden, Head(unembedding), tokens, mask, precision=coarse, chunk=Chunk(4, 8)
    )
    exact = token_logprobs(hidden, Head(unembedding), tokens, mask, precision=FP32)
    assert ours.dtype == jnp.float32
    np.testing.assert_array_equal(ours, ours.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(ours, exact, rtol=2**-6, atol=2**-6)


def test_sharded_equals_single_device():
    hidden, unembedding, tokens, mask, cotangents = inputs(
        batch=8, length=16, vocab=48, dtype=np.float32
    )

    def loss(hidden, unembedding, tokens, mask):
        scores = token_logprobs_and_entropy(
            hidden, Head(unembedding), tokens, mask, precision=FP32, chunk=Chunk(4, 16)
        )
        return jnp.sum(jnp.stack(scores) * cotangents)

    step = jax.value_and_grad(loss, argnums=(0, 1))
    mesh = make_mesh(data=4, fsdp=1, tensor=2)
    rows, entries = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("data", "tensor"))
    sharded = jax.jit(step, in_shardings=(rows, entries, rows, rows), out_shardings=None)(
        hidden, unembedding, tokens, mask
    )
    single = jax.jit(step)(hidden, unembedding, tokens, mask)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), sharded, single)


def test_the_head_is_gathered_and_its_gradient_reduced_once():
    """Whatever the number of chunks of positions: their loops send nothing."""
    layout = Layout(make_mesh(fsdp=8), PRESETS["fsdp"])
    hidden, unembedding, tokens, mask, cotangents = inputs(
        batch=8, length=16, width=8, vocab=48, dtype=np.float32
    )
    axes, rows = ("vocab", "embed"), Rows(layout)

    def gradient(unembedding, hidden, *, gathered=True):
        def loss(weights):
            head = Head(layout.gather(weights, axes), rows=rows) if gathered else Head(weights)
            scores = token_logprobs_and_entropy(
                hidden, head, tokens, mask, precision=FP32, chunk=Chunk(4, 16)
            )
            return jnp.sum(jnp.stack(scores) * cotangents)

        return jax.grad(loss)(unembedding)

    cut = layout.sharding(axes)
    given = (cut, layout.batch(("batch", "length", "embed")))
    step = jax.jit(gradient, in_shardings=given, out_shardings=cut)
    text = step.lower(unembedding, hidden).compile().as_text() or ""
    once, often = (collectives(text, trips=[n] * 2) for n in (1, 9))
    assert once == often
    assert once["all-gather"].size >= unembedding.nbytes
    single = jax.jit(functools.partial(gradient, gathered=False))(unembedding, hidden)
    np.testing.assert_allclose(step(unembedding, hidden), single, atol=2e-5)


@pytest.mark.parametrize(("name", "most"), [("fp32", 2 * 4), ("bf16_master", 3 * 4)])
def test_memory_per_vocabulary_entry_is_bounded(name, most):
    """Beyond one chunk an entry of the vocabulary costs D * `most` bytes: its row of the gradient
    accumulator (4), of the reordered unembedding (4, or 2) and, where XLA emulates bf16 products
    in f32, of an f32 copy of that and of the gradient before it is cast. Logits would cost B * T *
    4 = 512 bytes, of one chunk of positions alone 128; D * 12 = 96."""
    precision, batch, length, width, chunk = parse(name), 2, 64, 8, Chunk(16, 128)
    tokens = jnp.zeros((batch, length), jnp.int32)

    def compiled(vocab):
        def loss(hidden, unembedding):
            logprobs, entropy = token_logprobs_and_entropy(
                hidden, Head(unembedding), tokens, tokens == 0, precision=precision, chunk=chunk
            )
            return jnp.sum(logprobs + 0.1 * entropy)

        return (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
            .lower(
                jax.ShapeDtypeStruct((batch, length, width), precision.activations),
                jax.ShapeDtypeStruct((vocab, width), precision.compute),
            )
            .compile()
        )

    small, large = compiled(1024), compiled(8192)
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (small, large)]
    assert temporary[1] - temporary[0] <= (8192 - 1024) * width * most
    # The largest array of the program is the parameter itself, and whatever has the vocabulary as
    # a dimension has D as the other one.
    shapes = re.findall(r"(?:f64|f32|bf16|f16|s32|pred)\[([\d,]+)\]", large.as_text())
    shapes = {tuple(map(int, shape.split(","))) for shape in shapes}
    assert max(np.prod(shape) for shape in shapes) == 8192 * width
    assert {tuple(sorted(shape)) for shape in shapes if 8192 in shape} == {(width, 8192)}
