"""Formulas of parts: read as Python, each makes the part again."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import advantages, losses
from jaxrl.advantages import estimators
from jaxrl.losses import (
    Aggregation,
    Ratio,
    Recipe,
    TokenLoss,
    Weights,
    add,
    anchor_over_sampler,
    clipped,
    dapo,
    entropy_bonus,
    grpo,
    grpo_token_tis,
    k1,
    kl_penalty,
    objective,
    over_anchor,
    over_sampler,
    preference,
    prefix,
    reinforce,
    reweight,
    surrogate,
    token_loss,
    token_mean,
    truncated,
    unclipped,
    vetoed,
    with_terms,
)
from jaxrl.losses.from_config import PARTS
from tests.losses.cases import RECIPES, TERMS, lay_out, random_sequences

WORDS = {
    name: getattr(room, name) for room in (losses, advantages, estimators) for name in room.__all__
}
WORDS |= {"partial": functools.partial, "inf": math.inf}
ONE = clipped(over_sampler)
TWO = prefix(unclipped(over_sampler), "two/")
TIS = truncated(anchor_over_sampler, high=2.0)
VETO = vetoed(anchor_over_sampler, low=1e-4)
COMPOSED = {
    "a + b": ONE + TWO,
    "a - b": ONE - TWO,
    "a - (b + c)": ONE - (TWO + kl_penalty()),
    "-(a - b) / 2": -(ONE - TWO) / 2,
    "3 * (2 * a)": 3 * (2 * ONE),
    "-a + b": -ONE + TWO,
    "sum": sum([ONE, TWO, -0.5 * kl_penalty()]),
    "add": add(ONE, 0.1 * entropy_bonus()),
    "w * (2 * a) + b": TIS * (2 * unclipped(over_anchor)) + kl_penalty(),
    "w * v * a": TIS * VETO * clipped(over_anchor),
    "w * (v * a)": TIS * (VETO * clipped(over_anchor)),
    "w * (a + b)": VETO * (reinforce() + TWO),
    "weighted": kl_penalty(k1, ratio=over_sampler),
}
LOSSES = TERMS | COMPOSED


@jax.jit
def evaluate(scores, batch):
    """Each loss and the one that its formula makes."""
    return [
        (loss.apply(scores, batch), eval(str(loss), WORDS).apply(scores, batch))
        for loss in LOSSES.values()
    ]


def test_a_formula_is_the_loss_again():
    sequences = random_sequences(2)
    results = evaluate(*lay_out(sequences, [[i] for i in range(len(sequences))]))
    for name, ((value, metrics), (again, others)) in zip(LOSSES, results, strict=True):
        np.testing.assert_allclose(value, again, rtol=1e-6, atol=1e-6, err_msg=name)
        assert metrics.keys() == others.keys(), name
    for loss in LOSSES.values():
        same = eval(str(loss), WORDS)
        assert (str(same), same.needs, same.weighted) == (str(loss), loss.needs, loss.weighted)


@pytest.mark.parametrize(
    ("part", "formula"),
    [
        (
            clipped(over_sampler, high=0.28) + 0.001 * kl_penalty(),
            "clipped(over_sampler, low=0.2, high=0.28) + 0.001 * kl_penalty(k3)",
        ),
        (ONE - 2 * (TWO - kl_penalty()) / 3, f"{ONE} - (2 * ({TWO} - kl_penalty(k3))) / 3"),
        (ONE - (TWO - ONE), f"{ONE} - ({TWO} - {ONE})"),
        (reweight(reinforce(), VETO), f"{VETO} * reinforce()"),
        (np.float64(0.5) * ONE, f"0.5 * {ONE}"),
        (ONE * jnp.float32(3), f"3.0 * {ONE}"),
        (
            dapo() - 0.5 * entropy_bonus(),
            "Recipe(objective(clipped(over_sampler, low=0.2, high=0.28) - 0.5 * entropy_bonus(), "
            "token_mean), group_relative)",
        ),
    ],
)
def test_formulas(part, formula):
    assert str(part) == repr(part) == formula


def squared(ratio, advantages):
    return -advantages * ratio**2


def test_own_functions_print_by_name():
    def mine(scores, batch):
        return scores.logprobs, {}

    here = "test_own_functions_print_by_name"
    assert str(surrogate(squared, over_sampler)) == "surrogate(squared, over_sampler)"
    assert str(token_loss(mine) + ONE) == f"{here}.mine + {ONE}"
    assert str(TokenLoss(frozenset(), mine)) == f"TokenLoss({here}.mine)"
    assert str(Weights(frozenset(), lambda s, b: s)) == f"Weights({here}.<lambda>)"
    assert str(Aggregation(mine, squared)) == f"Aggregation({here}.mine, squared)"
    assert str(surrogate(np.sign, over_sampler)) == "surrogate(sign, over_sampler)"
    assert str(Recipe(objective(ONE, token_mean), functools.partial(mine, batch=3))).endswith(
        f"partial({here}.mine, batch=3))"
    )


MADE = {
    **{f"loss {name}": loss for name, loss in LOSSES.items()},
    **{f"recipe {name}": recipe for name, recipe in RECIPES.items()},
    **{f"{name} in a config": part for parts in PARTS.values() for name, part in parts.items()},
    **{name: getattr(losses, name) for name in losses.__all__},
    "adaptive": with_terms(grpo(), entropy_target=0.2, kl=0.1, correction=None),
    "pairs": preference.pairwise(preference.sigmoid()),
}
PRINTED = (Aggregation, Ratio, Recipe, TokenLoss, Weights)


@pytest.mark.parametrize("name", MADE)
def test_nothing_prints_as_an_address(name):
    part = MADE[name]
    text = repr(part) if isinstance(part, PRINTED) else losses.formulas.formula_text(part)
    assert "0x" not in text
    assert "<function" not in text


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_plus_term_is_a_recipe(name):
    recipe, term = RECIPES[name], 0.1 * entropy_bonus()
    goal = recipe.objective

    def of(loss):
        first = objective(loss, goal.aggregation, among=goal.among)
        return " + ".join(map(str, (first, *goal.others)))

    assert str((recipe + term).objective) == of(goal.loss + term)
    assert str(sum([recipe, term])) == str(recipe + term)
    assert str((recipe - term).objective) == of(goal.loss - term)
    assert (recipe + term).advantages is recipe.advantages
    assert (recipe + term).critic is recipe.critic
    assert str(eval(str(recipe), WORDS)) == str(recipe)


def test_config_terms_equal_algebra_terms():
    sequences = random_sequences(4)
    scores, batch = lay_out(sequences, [[i] for i in range(len(sequences))])
    pairs = [
        (grpo() + 0.1 * kl_penalty(), with_terms(grpo(), kl=0.1)),
        (dapo() - 0.1 * -entropy_bonus(), with_terms(dapo(), entropy=0.1)),
        (
            Recipe(objective(TIS * clipped(over_anchor), token_mean), estimators.centred),
            with_terms(grpo_token_tis(), aggregation=token_mean),
        ),
    ]

    @jax.jit
    def totals(logprobs):
        return [
            jax.value_and_grad(
                lambda lp, recipe=recipe: recipe.objective.total(
                    scores.replace(logprobs=lp), batch
                )[0]
            )(logprobs)
            for pair in pairs
            for recipe in pair
        ]

    found = totals(scores.logprobs)
    for (value, gradient), (other, expected) in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
        assert np.abs(gradient).max() > 0


def test_formulas_do_not_affect_hashes_or_compilation():
    loss = clipped(over_sampler)
    renamed = dataclasses.replace(loss, formula="renamed")
    assert (renamed, hash(renamed)) == (loss, hash(loss))
    sequences = random_sequences(1)
    case = lay_out(sequences, [[i] for i in range(len(sequences))])
    compiled = jax.jit(lambda x, loss: loss.apply(*x)[0].sum(), static_argnums=1)
    assert compiled(case, loss) == compiled(case, renamed)
    assert compiled._cache_size() == 1


def test_a_traced_factor_prints_as_its_type():
    texts = []
    jax.eval_shape(lambda x: texts.append(str(x * ONE)), jnp.float32(1))
    assert texts == [f"float32[] * {ONE}"]
