"""Losses of pairs: worked by hand, differentiated numerically, and the same in every layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl.core.batch import Rollout
from jaxrl.core.packing import pack
from jaxrl.losses import Scores, objective, preference
from jaxrl.losses.preference import ScoredCompletion, ScoredPair

LOSSES = {
    "sigmoid": preference.sigmoid(beta=0.5),
    "smoothed": preference.sigmoid(beta=0.5, label_smoothing=0.2),
    "hinge": preference.hinge(beta=0.5),
    "ipo": preference.ipo(beta=0.5),
    "ipo_summed": preference.ipo_summed(beta=0.5),
    "sigmoid_averaged": preference.sigmoid_averaged(beta=2.0),
    "rpo": preference.rpo(beta=0.5, nll=0.3),
    "length_desensitized": preference.length_desensitized(beta=0.5, tail=0.25),
    "robust": preference.robust(beta=0.5, label_smoothing=0.2),
    "exo": preference.exo(beta=0.5, label_smoothing=0.1),
    "discopop": preference.discopop(beta=0.5, tau=0.8),
    "forward_kl": preference.forward_kl(beta=0.5),
    "js_divergence": preference.js_divergence(beta=0.5),
    "alpha_divergence": preference.alpha_divergence(beta=0.5, alpha=0.3),
    "nca": preference.nca(beta=0.5),
    "sppo_hard": preference.sppo_hard(beta=0.5),
    "apo_zero": preference.apo_zero(beta=0.5),
    "apo_down": preference.apo_down(beta=0.5),
}


def ratios(chosen, rejected, chosen_tokens=2.0, rejected_tokens=4.0):
    """A pair with these log-ratios; the reference finds a token e^-1 likely."""

    def completion(ratio, tokens):
        return ScoredCompletion(*map(jnp.float32, (ratio - tokens, -tokens, tokens)))

    return ScoredPair(completion(chosen, chosen_tokens), completion(rejected, rejected_tokens))


def softplus(x):
    return math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


Q = sigmoid(2.0)  # the policy's probability that the chosen completion wins, beta = 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # chosen 3 over 2 tokens, rejected -1 over 4 tokens, beta 0.5: 0.5 (3 + 1) = 2.
        ("sigmoid", softplus(-2.0)),
        ("smoothed", 0.8 * softplus(-2.0) + 0.2 * softplus(2.0)),
        ("hinge", 0.0),
        ("ipo", (1.5 + 0.25 - 1.0) ** 2),
        ("ipo_summed", (4.0 - 1.0) ** 2),
        ("sigmoid_averaged", softplus(-2 * (1.5 + 0.25))),
        ("rpo", softplus(-2.0) - 0.3 * (3.0 - 2.0) / 2),
        ("length_desensitized", softplus(-2.0)),  # it gets its sums discounted already
        ("robust", (0.8 * softplus(-2.0) - 0.2 * softplus(2.0)) / 0.6),
        ("exo", Q * math.log(Q / 0.9) + (1 - Q) * math.log((1 - Q) / 0.1)),
        ("discopop", sigmoid(-2.5) * softplus(-2.0) + sigmoid(2.5) * math.exp(-2)),
        ("forward_kl", softplus(0.5 * (math.exp(-3) - math.exp(1)))),
        (  # f'(u) = log(2 u / (1 + u))
            "js_divergence",
            softplus(
                0.5 * math.log(2 * math.exp(-1) / (1 + math.exp(-1)))
                - 0.5 * math.log(2 * math.exp(3) / (1 + math.exp(3)))
            ),
        ),
        (  # f'(u) = (1 - u^-alpha) / alpha
            "alpha_divergence",
            softplus(0.5 * (math.exp(3) ** -0.3 - math.exp(-1) ** -0.3) / 0.3),
        ),
        ("nca", softplus(-1.5) + 0.5 * softplus(1.5) + 0.5 * softplus(-0.5)),
        ("sppo_hard", (3 - 1) ** 2 + (-1 + 1) ** 2),
        ("apo_zero", 1 - sigmoid(1.5) + sigmoid(-0.5)),
        ("apo_down", sigmoid(1.5) + 1 - sigmoid(2.0)),
    ],
)
def test_worked_by_hand(name, expected):
    np.testing.assert_allclose(LOSSES[name].apply(ratios(3.0, -1.0)), expected, rtol=1e-6)


def test_hinge_is_linear_below_the_margin():
    assert LOSSES["hinge"].apply(ratios(0.5, 0.5)) == 1.0
    assert LOSSES["hinge"].apply(ratios(-1.0, 1.0)) == 2.0


def test_bradley_terry_by_hand():
    loss = preference.bradley_terry(
        jnp.float32([2.0, 0.0]),
        jnp.float32([0.5, 1.0]),
        margin=jnp.float32([1.0, 0.0]),
        center_rewards=0.1,
    )
    expected = [softplus(-(1.5 - 1.0)) + 0.1 * 2.5**2, softplus(1.0) + 0.1 * 1.0]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_pair_losses_are_numerical_ones(name):
    for chosen, rejected in ((0.3, 0.9), (2.0, -3.0), (-4.0, 1.0)):  # both sides of the hinge
        apply = LOSSES[name].apply
        check_grads(
            lambda c, r, apply=apply: apply(ratios(c, r)),
            (jnp.float32(chosen), jnp.float32(rejected)),
            order=1,
            modes=["rev"],
            rtol=1e-2,
        )


def test_bradley_terry_gradient_is_numerical():
    check_grads(
        lambda c, r: preference.bradley_terry(c, r, margin=jnp.float32(0.7), center_rewards=0.05),
        (jnp.float32(0.4), jnp.float32(-0.3)),
        order=1,
        modes=["rev"],
        rtol=1e-2,
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_far_apart_pairs_are_finite(name, far):
    value, gradient = jax.value_and_grad(lambda c: LOSSES[name].apply(ratios(c, -c)))(far)
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_label_smoothing_of_a_half_says_nothing():
    for make in (preference.sigmoid, preference.robust, preference.exo, preference.aot):
        with pytest.raises(ValueError, match=r"label_smoothing=0\.5 must be"):
            make(label_smoothing=0.5)


def test_parameters_of_variants_have_bounds():
    with pytest.raises(ValueError, match=r"label_smoothing=0\.0 must be > 0"):
        preference.exo(label_smoothing=0.0)
    with pytest.raises(ValueError, match=r"tau=2\.0 must be"):
        preference.discopop(tau=2.0)
    with pytest.raises(ValueError, match=r"alpha=1\.5 must be"):
        preference.alpha_divergence(alpha=1.5)


def test_alpha_divergences_lie_between_dpo_and_the_forward_kl():
    pair = ratios(0.3, -0.2)
    for alpha, same in ((1e-3, preference.sigmoid()), (1.0, preference.forward_kl())):
        found = preference.alpha_divergence(alpha=alpha).apply(pair)
        np.testing.assert_allclose(found, same.apply(pair), rtol=1e-4)


def test_swapped_labels_do_not_bias_robust_dpo():
    """A share of swapped pairs has the expected loss of DPO without them."""
    share, robust = 0.2, LOSSES["robust"]
    found = (1 - share) * robust.apply(ratios(3.0, -1.0)) + share * robust.apply(ratios(-1.0, 3.0))
    np.testing.assert_allclose(found, softplus(-2.0), rtol=1e-5)


LENGTHS = [((2, 3), (2, 1)), ((1, 4), (1, 4)), ((3, 2), (3, 5))]  # (prompt, answer) of both


def answers():
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt=np.ones(prompt, np.int32),
            completion=rng.integers(2, 9, answer).astype(np.int32),
            logprobs=np.zeros(answer, np.float32),
            action_mask=np.ones(answer, bool),
            version=np.zeros(answer, np.int32),
            group=0,
        )
        for pair in LENGTHS
        for prompt, answer in pair
    ]


def laid_out(rows, *, width):
    """The batch, and for each answer its row and its first and last place."""
    rollouts = answers()
    margins = [np.eye(1, len(r.completion), len(r.completion) - 1)[0] * 0.5 for r in rollouts]
    batch = pack(rollouts, margins, rows=rows, row_length=width)
    places = {}
    for r, row in enumerate(rows):
        end = 0
        for i in row:
            end += rollouts[i].length
            places[i] = (r, end - len(rollouts[i].completion), end)
    return batch, places


LAYOUTS = {
    "one pair to a row": ([[0, 1], [2, 3], [4, 5]], 13),
    "odd width": ([[0, 1], [], [4, 5], [2, 3]], 14),
    "packed": ([[2, 3, 0, 1], [4, 5]], 20),
}


def completion(tail, pi, ref, i, *, other):
    """Log-probs of completion i under both policies, and its length; beyond the length of the
    other completion they count `tail` times."""
    weights = np.where(np.arange(len(pi[i])) < len(pi[other]), 1, tail)
    return (weights * pi[i]).sum(), (weights * ref[i]).sum(), float(len(pi[i]))


def test_a_tail_of_one_is_dpo():
    assert preference.length_desensitized(tail=1.0).tail == preference.sigmoid().tail
    with pytest.raises(ValueError, match=r"tail=1\.5"):
        preference.length_desensitized(tail=1.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_batch_loss_is_mean_over_pairs(name, layout):
    rng = np.random.default_rng(1)
    pi, ref = ([rng.normal(-1, 1, a) for pair in LENGTHS for _, a in pair] for _ in range(2))
    rows, width = LAYOUTS[layout]
    batch, places = laid_out(rows, width=width)
    logprobs, reference = (
        rng.normal(size=(len(rows), width)).astype(np.float32) for _ in range(2)
    )  # what stands outside the answers must not matter
    for i, (r, start, end) in places.items():
        logprobs[r, start:end], reference[r, start:end] = pi[i], ref[i]
    logprobs[:, 0] = 0
    goal = objective(preference.pairwise(LOSSES[name]), preference.pair_mean)

    def loss(logprobs):
        scores = Scores(logprobs=logprobs, reference=reference)
        total, metrics = goal.total(scores, batch)
        return total / goal.denominator(batch), metrics

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logprobs)
    pairs = [
        ScoredPair(
            *(
                ScoredCompletion(*completion(LOSSES[name].tail, pi, ref, i, other=2 * i0 + 1 - i))
                for i in (i0, i0 + 1)
            )
        )
        for i0 in (0, 2, 4)
    ]
    np.testing.assert_allclose(
        value, np.mean([LOSSES[name].apply(pair) for pair in pairs]), rtol=1e-5
    )
    np.testing.assert_allclose(
        metrics["reward/margin"].value,
        LOSSES[name].beta * np.mean([p.apart for p in pairs]),
        rtol=1e-5,
    )
    ahead = np.mean([p.apart > 0 for p in pairs])
    np.testing.assert_allclose(metrics["accuracy"].value, ahead)
    chosen = np.mean([pi[i].sum() for i in (0, 2, 4)])
    np.testing.assert_allclose(metrics["logprobs/chosen"].value, chosen, rtol=1e-5)
    assert np.isfinite(gradient).all()
    outside = ~np.asarray(batch.action_mask)
    assert not np.asarray(gradient)[outside].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranked_scores_meet_margins(layout):
    rows, width = LAYOUTS[layout]
    batch, _ = laid_out(rows, width=width)
    rewards = np.array([1.0, 0.5, -1.0, 0.25, 0.0, 0.0], np.float32)
    scores = np.full((len(rows), width + 1), 7.0, np.float32)  # where there is no sequence
    for r, row in enumerate(rows):
        scores[r, 1 : len(row) + 1] = rewards[row]
    total, metrics = preference.ranked(jnp.asarray(scores), batch, center_rewards=0.1)
    assert float(preference.pair_count(batch)) == 3
    chosen, rejected = rewards[::2], rewards[1::2]
    expected = [
        softplus(-(c - r - 0.5)) + 0.1 * (c + r) ** 2 for c, r in zip(chosen, rejected, strict=True)
    ]
    np.testing.assert_allclose(total, np.sum(expected), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"].value, 1 / 3)  # a tie is no success
    np.testing.assert_allclose(metrics["score/chosen"].value, chosen.mean(), atol=1e-6)


def test_empty_batch_has_zero_loss():
    batch, _ = laid_out([[], []], width=8)
    zeros = np.zeros((2, 8), np.float32)
    for loss in LOSSES.values():
        goal = objective(preference.pairwise(loss), preference.pair_mean)
        total, _ = goal.total(Scores(logprobs=zeros, reference=zeros), batch)
        assert float(total) == float(goal.denominator(batch)) == 0
