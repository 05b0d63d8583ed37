"""What is rejected, by hand, on both sides of every bound; presets."""

import jax
import numpy as np
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.losses import (
    anchor_over_sampler,
    binary_kl,
    both,
    clipped,
    error_within,
    geometric,
    grpo,
    k2_sum_within,
    k2_within,
    k3_sum_within,
    k3_within,
    masked,
    near,
    objective,
    off_policy_negatives,
    one_sequence,
    over_anchor,
    over_sampler,
    prefix,
    presets,
    product,
    reinforce,
    reweight,
    sequence,
    token_mean,
    top_entropy,
    total_variation,
    truncated,
    trust_region,
    vetoed,
    with_terms,
    within,
)
from jaxrl.losses.algebra import Weights
from jaxrl.losses.from_config import PARTS

RATIOS = np.array([0.4, 0.9, 1.5, 4.0, np.nan])  # learner / sampler; the last one is unknown


def applied(weights, *, ratios=RATIOS, advantages=None, **scores):
    ratios = np.asarray(ratios, float)
    advantages = np.ones(len(ratios)) if advantages is None else advantages
    given = {"logprobs": -2.0, "anchor": -2.0, "sampler": -2.0 - np.log(ratios), **scores}
    scores, batch = one_sequence(advantages=advantages, **given)
    scores, _ = objective(weights * reinforce(), token_mean).survey(scores, batch)
    factors, metrics = jax.jit(weights.apply)(scores, batch)
    return np.asarray(factors[0]), to_floats(metrics)


K3 = np.mean(np.array([0.4, 0.9, 1.5, 4.0, 1.0]) - 1 - np.log([0.4, 0.9, 1.5, 4.0, 1.0]))
K2 = np.mean(np.log([0.4, 0.9, 1.5, 4.0, 1.0]) ** 2 / 2)
ERROR = np.mean([2.5, 1 / 0.9, 1.5, 4.0, 1.0])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (within(over_sampler, low=0.5, high=2.0), [0, 1, 1, 0, 1]),
        (within(product(over_sampler), high=2.17), [1] * 5),  # .4 x .9 x 1.5 x 4 = 2.16
        (within(product(over_sampler), high=2.15), [0] * 5),
        (within(geometric(over_sampler), low=0.9, high=1.17), [1] * 5),  # 2.16 ** .2 = 1.1665
        (within(geometric(over_sampler), low=0.9, high=1.16), [0] * 5),
        (k3_within(over_sampler, high=K3 + 1e-3), [1] * 5),
        (k3_within(over_sampler, high=K3 - 1e-3), [0] * 5),
        (k2_within(over_sampler, high=K2 + 1e-3), [1] * 5),
        (k2_within(over_sampler, high=K2 - 1e-3), [0] * 5),
        (k3_sum_within(over_sampler, high=5 * K3 + 1e-3), [1] * 5),
        (k3_sum_within(over_sampler, high=5 * K3 - 1e-3), [0] * 5),
        (k2_sum_within(over_sampler, high=5 * K2 + 1e-3), [1] * 5),
        (k2_sum_within(over_sampler, high=5 * K2 - 1e-3), [0] * 5),
        (error_within(over_sampler, high=ERROR + 1e-3), [1] * 5),
        (error_within(over_sampler, high=ERROR - 1e-3), [0] * 5),
        (vetoed(over_sampler, low=0.41), [0] * 5),
        (vetoed(over_sampler, low=0.39), [1] * 5),
        (vetoed(over_sampler, low=0.39, high=4.1), [1] * 5),
        (vetoed(over_sampler, low=0.39, high=3.9), [0] * 5),
        (
            both(within(over_sampler, high=2), truncated(over_sampler, high=1.2)),
            [0.4, 0.9, 1.2, 0, 1],
        ),
    ],
)
def test_by_hand(weights, expected):
    factors, metrics = applied(weights)
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    rejected = next(v for k, v in metrics.items() if k.startswith("rejected/"))
    assert rejected == pytest.approx(np.mean(np.array(expected) == 0))


def test_only_the_sequence_at_fault_is_rejected():
    scores, batch = one_sequence(
        advantages=[1.0] * 4, logprobs=-2.0, sampler=[-2.0, -2.0, -2.0, 9.0]
    )
    batch = batch.replace(segments=np.array([[1, 1, 2, 2]]))
    for weights in (
        vetoed(over_sampler),
        k3_within(over_sampler),
        within(product(over_sampler), low=0.1, high=2),
    ):
        np.testing.assert_array_equal(jax.jit(weights.apply)(scores, batch)[0], [[1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("advantage", "delta", "kept"), [(-1.0, 0.19, 0), (-1.0, 0.21, 1), (1.0, 0.19, 1)]
)
def test_off_policy_negatives(advantage, delta, kept):
    """Mean of log mu - log pi is .2."""
    weights = off_policy_negatives(over_sampler, delta=delta)
    factors, _ = applied(weights, ratios=np.exp([-0.5, 0.1]), advantages=[advantage] * 2)
    np.testing.assert_array_equal(factors, [kept] * 2)


P, Q = np.array([0.6, 0.3, 0.6, 0.3, 0.01]), np.array([0.3, 0.6, 0.3, 0.6, 0.001])
UP = 0.3 * np.log(0.3 / 0.6) + 0.7 * np.log(0.7 / 0.4)  # binary KL of .3 from .6, .184
DOWN = 0.6 * np.log(0.6 / 0.3) + 0.4 * np.log(0.4 / 0.7)  # of .6 from .3, .192


@pytest.mark.parametrize(
    ("weights", "expected"),  # A is 1, 1, -1, -1, 1
    [
        (trust_region(over_sampler, total_variation), [0, 1, 1, 0, 1]),
        (trust_region(over_sampler, total_variation, high=0.31), [1, 1, 1, 0, 1]),
        (trust_region(over_sampler, total_variation, low=0.31), [0, 1, 1, 1, 1]),
        (trust_region(over_sampler, binary_kl, high=UP - 1e-3, low=DOWN - 1e-3), [0, 1, 1, 0, 1]),
        (trust_region(over_sampler, binary_kl, high=UP + 1e-3, low=DOWN - 1e-3), [1, 1, 1, 0, 1]),
        (trust_region(over_sampler, binary_kl, high=UP - 1e-3, low=DOWN + 1e-3), [0, 1, 1, 1, 1]),
        (near(over_sampler, total_variation, high=0.29), [0, 0, 0, 0, 1]),
        (near(over_sampler, total_variation, high=0.31), [1, 1, 1, 1, 1]),
        (near(over_sampler, binary_kl, high=(UP + DOWN) / 2), [1, 0, 1, 0, 1]),
    ],
)
def test_divergences_bound_probabilities_and_not_their_ratio(weights, expected):
    """p - q is .3, -.3, .3, -.3, and for a rare token whose ratio is 10, .009."""
    advantages = [1.0, 1.0, -1.0, -1.0, 1.0]
    chosen = {"logprobs": np.log(P), "sampler": np.log(Q)}
    factors, metrics = applied(weights, ratios=P / Q, advantages=advantages, **chosen)
    np.testing.assert_array_equal(factors, expected)
    assert metrics == {"rejected/divergence": pytest.approx(np.mean(np.array(expected) == 0))}


def test_binary_kl_of_certain_tokens_is_finite():
    certain = np.float32([0.0, 0.0, -1e-9, -80.0])
    other = np.float32([0.0, -1.0, -80.0, 0.0])
    found = np.asarray(jax.jit(binary_kl)(certain, other))
    assert np.isfinite(found).all()
    assert found[0] == 0
    assert (found[1:] > 0.1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: within(over_sampler, high=1.0), "0 <= low < 1 < high"),
        (lambda: k3_within(over_sampler, high=0.0), "high=0"),
        (lambda: vetoed(over_sampler, low=1.0), "low=1"),
        (lambda: vetoed(over_sampler, high=0.5), "high=0.5"),
        (lambda: error_within(over_sampler, high=1.0), "high=1"),
        (lambda: off_policy_negatives(over_sampler, delta=0.0), "delta=0"),
        (lambda: trust_region(over_sampler, total_variation, low=-0.1), "low=-0.1"),
        (lambda: near(over_sampler, total_variation, high=0.0), "high=0"),
        (lambda: vetoed(product(over_sampler)), "vetoed reads the ratio of each token"),
        (lambda: k3_within(geometric(over_sampler)), "k3_within reads the ratio of each token"),
        (lambda: trust_region(sequence(over_sampler), binary_kl), "trust_region reads the ratio"),
        (lambda: near(sequence(over_sampler), binary_kl), "near reads the ratio of each token"),
        (lambda: error_within(product(over_sampler)), "error_within reads the ratio of each"),
        (lambda: off_policy_negatives(product(over_sampler), delta=1), "ratio of each token"),
        (lambda: product(product(over_sampler)), "product reads the ratio of each token"),
        (lambda: geometric(sequence(over_sampler)), "geometric reads the ratio of each token"),
        (lambda: sequence(geometric(over_sampler)), "sequence reads the ratio of each token"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rejection_ignores_policy_changes():
    """So it may stand beside a ratio and a correction of the same kind, and only they clash."""
    weights = both(truncated(anchor_over_sampler, high=2), vetoed(anchor_over_sampler))
    assert reweight(clipped(over_anchor), weights).needs == {"anchor"}
    assert reweight(clipped(over_sampler), vetoed(over_sampler)).needs == set()
    with pytest.raises(ValueError, match="count it again"):
        both(truncated(over_sampler, high=2), masked(over_sampler, high=2))
    with pytest.raises(ValueError, match="count it again"):
        reweight(clipped(over_sampler), both(presets.veto, presets.token_tis))


def test_metrics_of_two_rejections_are_told_apart():
    case = one_sequence(advantages=[1.0], logprobs=-1.0)
    token, whole = within(over_sampler, high=2), within(product(over_sampler), high=2)
    with pytest.raises(ValueError, match=r"'rejected/outside'.*prefix"):
        jax.eval_shape(both(token, whole).apply, *case)
    loss = reweight(reinforce(), both(token, prefix(whole, "sequence/")))
    metrics = jax.eval_shape(loss.apply, *case)[1]
    assert {"rejected/outside", "sequence/rejected/outside"} <= metrics.keys()


@pytest.mark.parametrize("name", PARTS[Weights])
def test_presets_change_nothing_where_the_sampler_agrees(name):
    factors, _ = applied(PARTS[Weights][name], ratios=[1.0, 1.0, np.nan])
    np.testing.assert_array_equal(factors, np.ones(3))
    assert PARTS[Weights][name] is getattr(presets, name)


def test_weights_of_the_whole_batch_are_no_rejection():
    """A rejection is one already; the error came from within the step."""
    with pytest.raises(ValueError, match=r"among=top_entropy\(0\.2\) is computed over the whole"):
        with_terms(grpo(), rejection=top_entropy(0.2))
