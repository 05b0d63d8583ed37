"""Losses of pairs that compare a completion with the whole batch: against numpy in float64, however
the batch is packed and divided into microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses import Scores, objective, preference
from tests.losses.test_preference import LAYOUTS, LENGTHS, laid_out

BETA = 0.5
LOSSES = {
    "bco": preference.bco(beta=BETA),
    "aot": preference.aot(beta=BETA, label_smoothing=0.1),
    "aot_unpaired": preference.aot_unpaired(beta=BETA),
}


def logistic(h, share=0.0):
    return (1 - share) * np.log1p(np.exp(-h)) + share * np.log1p(np.exp(h))


def by_hand(name, pi, ref, *, delta=None):
    """The mean over pairs, of sums over completions f64[6]; `delta` is BCO's, which is constant."""
    d = pi - ref
    chosen, rejected = d[::2], d[1::2]
    if name == "bco":
        delta = BETA * d.mean() if delta is None else delta
        return np.mean(logistic(BETA * chosen - delta) + logistic(delta - BETA * rejected))
    if name == "aot":
        margins = np.sort(pi[::2] - pi[1::2]) - np.sort(ref[::2] - ref[1::2])
        return np.mean(logistic(BETA * margins, 0.1))
    return np.mean(logistic(BETA * (np.sort(chosen) - np.sort(rejected))))


def numerical_gradient(name, pi, ref):
    """By the log-prob of each completion, f64[6]."""
    delta, h = BETA * (pi - ref).mean(), 1e-6
    moved = (
        [by_hand(name, pi + sign * h * np.eye(6)[i], ref, delta=delta) for sign in (1, -1)]
        for i in range(6)
    )
    return np.array([(up - down) / (2 * h) for up, down in moved])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_by_hand(name, layout):
    rng = np.random.default_rng(3)
    pi, ref = ([rng.normal(-1, 1, a) for pair in LENGTHS for _, a in pair] for _ in range(2))
    rows, width = LAYOUTS[layout]
    batch, places = laid_out(rows, width=width)
    logprobs, reference = (
        rng.normal(size=(len(rows), width)).astype(np.float32) for _ in range(2)
    )  # what stands outside the answers must not matter
    for i, (r, start, end) in places.items():
        logprobs[r, start:end], reference[r, start:end] = pi[i], ref[i]
    goal = objective(preference.pairwise(LOSSES[name]), preference.pair_mean)
    scores = Scores(logprobs=jnp.asarray(logprobs), reference=jnp.asarray(reference))
    scores, _ = jax.jit(goal.survey)(scores, batch)

    @jax.jit
    @jax.value_and_grad
    def loss(logprobs, rows):  # of one microbatch
        part = jax.tree.map(
            lambda x: jnp.asarray(x)[rows], (scores.replace(logprobs=logprobs), batch)
        )
        return goal.total(*part)[0] / goal.denominator(batch)

    every = np.arange(len(rows))
    value, gradient = loss(scores.logprobs, every)
    parts = [loss(scores.logprobs, every[i : i + 1]) for i in every]
    np.testing.assert_allclose(sum(part[0] for part in parts), value, rtol=1e-6)
    np.testing.assert_allclose(sum(part[1] for part in parts), gradient, atol=1e-7)

    sums = [np.array([one.sum() for one in values]) for values in (pi, ref)]
    np.testing.assert_allclose(value, by_hand(name, *sums), rtol=1e-5)
    expected = numerical_gradient(name, *sums)
    assert np.abs(expected).max() > 0.05
    for i, (r, start, end) in places.items():
        np.testing.assert_allclose(gradient[r, start:end], expected[i], rtol=1e-4, atol=1e-6)
    assert not np.asarray(gradient)[~np.asarray(batch.action_mask)].any()


def test_equal_policies_give_the_loss_of_a_coin():
    """As at the first step, when all log-ratios are 0 and every rank is tied."""
    batch, _ = laid_out(*LAYOUTS["packed"][:1], width=LAYOUTS["packed"][1])
    same = jnp.full(batch.tokens.shape, -1.0)

    @functools.partial(jax.jit, static_argnums=0)
    def mean(goal, logprobs):
        scores, _ = goal.survey(Scores(logprobs=logprobs, reference=logprobs), batch)
        return goal.total(scores, batch)[0] / goal.denominator(batch)

    for name, coins in {"bco": 2, "aot": 1, "aot_unpaired": 1}.items():
        goal = objective(preference.pairwise(LOSSES[name]), preference.pair_mean)
        np.testing.assert_allclose(mean(goal, same), coins * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_empty_batch_has_zero_loss(name):
    batch, _ = laid_out([[], []], width=8)
    zeros = np.zeros((2, 8), np.float32)
    goal = objective(preference.pairwise(LOSSES[name]), preference.pair_mean)
    scores, _ = jax.jit(goal.survey)(Scores(logprobs=zeros, reference=zeros), batch)
    assert float(jax.jit(goal.total)(scores, batch)[0]) == 0
