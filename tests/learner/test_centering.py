"""Score centering: the term equals the sum over the vocabulary, and removes the drift alone."""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.casts import as_served
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import Precision, sampler_precision
from jaxrl.diagnostics.ratio.drift import make_drift
from jaxrl.learner.policy import make_learner
from jaxrl.losses import objective, reinforce, score_centering, token_sum
from jaxrl.models.model import decoder
from tests import tiny

MODEL = decoder(tiny.CONFIG)._replace(temperature=0.8)
ROLLOUTS = tiny.rollouts(6)
SHAPE = MinibatchShape(row_length=24, rows_per_microbatch=3)
SCRIPTS = Path(__file__).parents[2] / "scripts"
BATCH = pack_minibatch(ROLLOUTS, [1.0, -0.5, 2.0, 0.3, -1.0, 0.7], shape=SHAPE)


def gradient(loss, precision: str):
    """The gradient of a step, read off a step of plain descent."""
    params = tiny.params()
    learner = make_learner(
        MODEL, objective(loss, token_sum), optimizer=optax.sgd(1.0), precision=precision
    )
    after, metrics = jax.jit(learner.step)(learner.init(params), BATCH)
    return tiny.difference(params, after.params), metrics


def logits(params, hidden: jax.Array) -> jax.Array:
    """Tempered logits before each token, f32[B, T, V]."""
    head = MODEL.unembedding(params).astype(jnp.float32)
    z = jnp.einsum("btd,vd->btv", hidden.astype(jnp.float32), head, precision="highest")
    return jnp.roll(z, 1, axis=1) / MODEL.temperature


@pytest.mark.parametrize("precision", ["phantom", "phantom,wire=f8_e4m3"])
def test_term_equals_the_sum_over_the_vocabulary(precision):
    policy, batch, params = Precision.of(precision), BATCH.batch, tiny.params()

    @jax.jit
    def sampled(served):
        hidden = MODEL.hidden_of(served, batch, precision=sampler_precision(policy))
        return jax.nn.softmax(logits(served, hidden))

    q = sampled(jax.jit(as_served, static_argnums=1)(params, policy))

    def brute(params):
        logp = jax.nn.log_softmax(logits(params, MODEL.hidden_of(params, batch, precision=policy)))
        taken = jnp.take_along_axis(logp, batch.tokens[:, :, None], axis=-1)[:, :, 0]
        centred = taken - jnp.sum(q * logp, axis=-1)
        return -jnp.sum(jnp.where(batch.action_mask, batch.advantages * centred, 0))

    found, _ = gradient(reinforce() + score_centering(), precision)
    difference = tiny.norm(tiny.difference(found, jax.jit(jax.grad(brute))(params)))
    assert difference < 2e-5 * tiny.norm(found)
    plain, _ = gradient(reinforce(), precision)
    drift = tiny.norm(tiny.difference(found, plain))
    assert drift > 50 * difference
    share = jax.jit(make_drift(MODEL, precision=precision))(params, BATCH)
    assert share == pytest.approx(drift / tiny.norm(plain), rel=1e-3)


def test_a_learner_in_f16_has_the_drift_of_one_in_f32():
    """Both against the same sampler in bf16. At f16's loss scale of 65536 the gradient's sum over
    the tokens is infinite, and a divisor that was not finite counted as 1."""
    found, expected = (
        float(jax.jit(make_drift(MODEL, precision=precision))(tiny.params(), BATCH))
        for precision in ("fp16_master,sampler=bf16,wire=f32", "phantom")
    )
    assert found == pytest.approx(expected, rel=0.02)


def test_matched_sampler_has_no_drift():
    """E_p[grad log p] = 0: only roundings remain."""
    centred, metrics = gradient(reinforce() + score_centering(), "fp32")
    plain, plain_metrics = gradient(reinforce(), "fp32")
    assert tiny.norm(tiny.difference(centred, plain)) < 1e-5 * tiny.norm(plain)
    np.testing.assert_allclose(  # the term adds nothing to the value
        metrics["loss"].total, plain_metrics["loss"].total, rtol=1e-6
    )


def test_more_of_the_first_tokens_are_nearer_to_the_term(tmp_path, monkeypatch, capsys):
    """The command's table: without all tokens of q the term has an error, which falls with them."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "cde")))
    model = tiny.write_checkpoint(tmp_path / "model")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", ["top_centering.py", str(model), str(prompts), "--group=2"])
    importlib.import_module("top_centering").main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[float(cell) for cell in line.strip("|").split("|")] for line in lines[2:]]
    counts, known, *errors = zip(*cells, strict=True)
    assert counts == (1, 5, 20, 50)  # of 64
    assert sorted(known) == list(known)
    assert known[-1] < 1
    for column in errors:
        assert sorted(column, reverse=True) == list(column)
        assert column[0] > 0.1
        assert column[-1] < 0.5 * column[0]
