"""Tokens chosen among those of the whole batch, by hand and against a sort."""

import jax
import numpy as np
import pytest

from jaxrl.losses import (
    Weights,
    objective,
    one_sequence,
    over_sampler,
    reinforce,
    sequence_mean_token_mean,
    token_mean,
    top_covariance,
    top_entropy,
    vetoed,
    whole_batch,
    within,
    without_covariance,
)

RNG = np.random.default_rng(0)
SIZE = 500
NUMBERS = {
    "advantages": RNG.normal(size=SIZE),
    "logprobs": -RNG.exponential(size=SIZE),
    "entropy": np.round(RNG.exponential(size=SIZE), 2),  # with ties, and zeros
    "action_mask": RNG.random(SIZE) < 0.9,
}


def chosen(weights, **changes):
    goal = objective(weights * reinforce(), token_mean)
    scores, metrics = jax.jit(goal.survey)(*one_sequence(**NUMBERS | changes))
    (found,) = scores.whole.values()
    (share,) = metrics.values()
    mask = (NUMBERS | changes)["action_mask"]
    return np.asarray(found[0]), np.asarray(mask), float(share.value)


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 1.0])
def test_top_entropy_is_what_a_sort_finds(share):
    found, mask, reported = chosen(top_entropy(share))
    entropy = NUMBERS["entropy"][mask]
    least = np.sort(entropy)[::-1][max(1, int(share * mask.sum())) - 1]
    np.testing.assert_array_equal(found[mask], entropy >= least)
    assert reported == pytest.approx(np.mean(entropy >= least))


def test_top_covariance_is_what_a_sort_finds():
    found, mask, _ = chosen(top_covariance(0.1))
    a, p = (NUMBERS[name][mask] for name in ("advantages", "logprobs"))
    parts = (a - a.mean()) * (p - p.mean())
    assert found[mask].sum() == int(0.1 * mask.sum())
    assert parts[found[mask] == 1].min() > parts[found[mask] == 0].max()


def test_stopped_tokens_lie_between_bounds():
    a, p = (np.where(NUMBERS["action_mask"], NUMBERS[n], 0) for n in ("advantages", "logprobs"))
    count = NUMBERS["action_mask"].sum()
    parts = (a - a.sum() / count) * (p - p.sum() / count)
    between = NUMBERS["action_mask"] & (parts > 0.1) & (parts < 2.0)
    everything, mask, _ = chosen(without_covariance(1.0, low=0.1, high=2.0))
    np.testing.assert_array_equal(everything[mask], ~between[mask])
    some, _, reported = chosen(without_covariance(0.05, low=0.1, high=2.0))
    stopped = mask & (some == 0)
    assert stopped.sum() == int(0.05 * mask.sum())
    assert reported == pytest.approx(stopped.sum() / mask.sum())
    assert between[stopped].all()
    # Drawn evenly: about half of them have more than the median part of those between the bounds.
    assert 0.2 < np.mean(parts[stopped] > np.median(parts[between])) < 0.8
    assert NUMBERS["advantages"][stopped].std() > 0.5


def test_rejected_tokens_leave_the_denominator():
    """Token 2 of the first sequence and the whole second one are rejected."""
    scores, batch = one_sequence(
        advantages=[1.0, 2.0, 4.0, 8.0, 16.0], logprobs=-1.0, sampler=[-1.0, -2.0, -1.0, -2.0, -2.0]
    )
    batch = batch.replace(segments=np.array([[1, 1, 1, 2, 2]]))
    rejection = within(over_sampler, high=2.0)
    for how, inside, outside in (
        (token_mean, -(1 + 4) / 2, -(1 + 4) / 5),
        (sequence_mean_token_mean, -(1 + 4) / 2, -((1 + 4) / 3) / 2),
    ):
        kept = objective(rejection * reinforce(), how)
        left = objective(reinforce(), how, among=rejection)
        for goal, expected in ((kept, outside), (left, inside)):
            found, _ = goal.survey(scores, batch)
            denominator = goal.denominators(batch, found.whole)[0]
            total, _ = goal.total(found, batch)
            assert float(total / denominator) == pytest.approx(expected)


def test_what_is_not_computed_is_named():
    case = one_sequence(advantages=[1.0], logprobs=-1.0, entropy=1.0)
    goal = objective(top_entropy(0.5) * reinforce(), token_mean)
    with pytest.raises(ValueError, match=r"top_entropy\(0\.5\) is computed over the whole batch"):
        goal.total(*case)
    with pytest.raises(
        ValueError, match=r"whole_batch: top_entropy\(0\.5\) contains weights of the"
    ):
        whole_batch(top_entropy(0.5))
    with pytest.raises(ValueError, match=r"among=top_entropy\(0\.5\) is computed over the whole"):
        objective(reinforce(), token_mean, among=top_entropy(0.5))
    with pytest.raises(TypeError, match=r"among=reinforce\(\) is not Weights"):
        objective(reinforce(), token_mean, among=reinforce())
    ones, zeros = (
        whole_batch(Weights(frozenset(), lambda s, b, x=x: (x * b.advantages, {}))) for x in (1, 0)
    )
    with pytest.raises(ValueError, match="two weights of the whole batch print as"):
        _ = objective(ones * zeros * reinforce(), token_mean).whole
    for make in (top_entropy, top_covariance, without_covariance):
        with pytest.raises(ValueError, match=r"share=1\.5 must be > 0 and <= 1"):
            make(1.5)


def test_survey_needs_differ_from_step_needs():
    goal = objective(top_entropy(0.5) * reinforce(), token_mean, among=vetoed(over_sampler))
    assert goal.needs == {"entropy"}
    assert goal.step_needs == set()
    assert [repr(weights) for weights in goal.whole] == [
        "top_entropy(0.5)",
        "vetoed(over_sampler, low=0.0001, high=inf)",
    ]
