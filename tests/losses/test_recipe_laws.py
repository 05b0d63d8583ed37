"""What holds for every recipe: on-policy it is REINFORCE, and its two wirings agree."""

import dataclasses
import functools
import inspect

import jax
import numpy as np
import pytest

from jaxrl.losses import (
    Weights,
    anchor_over_sampler,
    build,
    geometric,
    objective,
    over_anchor,
    over_sampler,
    product,
    recipes,
    reinforce,
    reweight,
    sequence,
    sequence_mean_token_sum,
    token_mean,
    truncated,
    unclipped,
)
from jaxrl.losses.from_config import PARTS
from tests.losses.cases import RECIPES, lay_out, random_sequences

ROWS = [[i] for i in range(6)]


def gradient(reduced, scores, batch):
    (scores, _), total = reduced.survey(scores, batch), reduced.total
    return jax.grad(lambda lp: total(scores.replace(logprobs=lp), batch)[0])(scores.logprobs)


def value(reduced, scores, batch):
    return reduced.total(reduced.survey(scores, batch)[0], batch)[0]


@functools.cache
def case(*, spread, same):
    """Sequences of one advantage each, all sampler log-probs known; those of the anchor if they
    are to be the same."""
    sequences = random_sequences(5, spread=spread)
    for i, s in enumerate(sequences):
        s.advantages[:] = (-1) ** i * (0.5 + i / 3)
        known = ~np.isnan(s.rollout.logprobs) & (not same)
        s.rollout.logprobs[:] = np.where(known, s.rollout.logprobs, s.scores["anchor"])
    return lay_out(sequences, ROWS)


@jax.jit
def on_policy_gradients(scores, batch):
    """Of each recipe, and of REINFORCE reduced in the same way. The product of ratios moves with
    every token, so there the tokens of a sequence add up."""
    found = {}
    for name, recipe in RECIPES.items():
        how = sequence_mean_token_sum if name == "rloo" else recipe.objective.aggregation
        plain = objective(reinforce(), how)
        policy = dataclasses.replace(recipe.objective, others=())  # without VAPO's likelihood
        found[name] = gradient(policy, scores, batch), gradient(plain, scores, batch)
    del found["clip_cov"]  # stops at least one token's gradient
    return found


def test_at_ratio_one_every_recipe_is_reinforce():
    for name, (own, plain) in on_policy_gradients(*case(spread=0.0, same=True)).items():
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6, err_msg=name)


def _wired(name, ratio):
    needed = {"max_length": 8} if name == "dr_grpo" else {}
    return build(name, needed | {"ratio": ratio}).objective


WIRED = [
    name
    for name in recipes.__all__
    if "ratio" in inspect.signature(getattr(recipes, name)).parameters
]


@jax.jit
def wirings(scores, batch):
    return {
        name: [
            (value(reduced, scores, batch), gradient(reduced, scores, batch))
            for reduced in (_wired(name, "over_sampler"), _wired(name, "over_anchor"))
        ]
        for name in WIRED
    }


def test_bypass_equals_decoupled_for_equal_anchors():
    assert set(recipes.__all__) - set(WIRED) == {"grpo_token_tis", "grpo_seq_mis", "mlperf"}
    for name, (bypass, decoupled) in wirings(*case(spread=0.3, same=True)).items():
        np.testing.assert_allclose(bypass[0], decoupled[0], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(bypass[1], decoupled[1], rtol=1e-5, atol=1e-7, err_msg=name)


def test_weights_of_one_change_nothing():
    names = list(PARTS[Weights])

    @jax.jit
    def gradients(scores, batch):
        parameters = {"ratio": "over_anchor"}
        corrected = [build("grpo", parameters | {"correction": name}) for name in names]
        corrected += [build(name, {}) for name in ("grpo_token_tis", "grpo_seq_mis")]
        plain = build("grpo", parameters)
        return [gradient(recipe.objective, scores, batch) for recipe in (plain, *corrected)]

    plain, *corrected = gradients(*case(spread=0.3, same=True))
    assert np.abs(plain).max() > 0
    for found in corrected:
        np.testing.assert_array_equal(found, plain)


def test_an_anchor_in_between_cancels():
    """learner / anchor times anchor / sampler is learner / sampler, at every level."""

    @jax.jit
    def both(scores, batch):
        found = []
        for level in (lambda ratio: ratio, product, geometric):
            weights = truncated(level(anchor_over_sampler), high=np.inf)
            decoupled = reweight(unclipped(level(over_anchor)), weights)
            found.append(
                [
                    gradient(objective(loss, token_mean), scores, batch)
                    for loss in (decoupled, unclipped(level(over_sampler)))
                ]
            )
        return found

    for decoupled, bypass in both(*case(spread=0.3, same=False)):
        np.testing.assert_allclose(decoupled, bypass, rtol=1e-4, atol=1e-6)


def test_the_two_forms_of_gspo():
    """They agree where a sequence has one advantage, and not where its tokens differ."""

    @jax.jit
    def forms(scores, batch):
        reduced = [
            build("gspo", {"level": level, "clip_low": 0.2, "clip_high": 0.2}).objective
            for level in ("sequence", "geometric")
        ]
        return [gradient(one, scores, batch) for one in reduced]

    through, own = forms(*case(spread=0.05, same=True))
    np.testing.assert_allclose(through, own, rtol=1e-5, atol=1e-7)
    scores, batch = case(spread=0.05, same=True)
    ramp = batch.advantages * (1 + batch.positions)
    through, own = forms(scores, batch.replace(advantages=ramp))
    assert np.abs(np.asarray(through - own)).max() > 1e-2


@pytest.mark.parametrize("name", WIRED)
def test_recipes_over_sampler_refuse_corrections(name):
    """Except those that ignore the ratio of the update: they have no importance weight yet."""
    ratio = inspect.signature(getattr(recipes, name)).parameters["ratio"].default
    parameters = {"max_length": 8} if name == "dr_grpo" else {}
    if ratio is over_sampler:
        with pytest.raises(ValueError, match=r"mismatch.*count it again"):
            build(name, parameters | {"correction": "token_tis"})
        parameters["ratio"] = "over_anchor"
    corrected = build(name, parameters | {"correction": "token_tis + veto"})
    assert "anchor" in corrected.objective.needs


def test_token_parts_refuse_sequence_ratios():
    for name in ("gmpo", "opsm", "dppo", "prime", "prime_ipo", "rloo", "gspo"):
        with pytest.raises(ValueError, match="ratio of each token"):
            getattr(recipes, name)(ratio=sequence(over_sampler))
