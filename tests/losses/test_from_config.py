"""Losses named in a config: what is accepted, and what the errors say."""

import textwrap

import numpy as np
import pytest

from jaxrl import advantages
from jaxrl.advantages import estimators, is_marked, within_group
from jaxrl.losses import Objective, Recipe, build, one_sequence, recipes
from tests.losses.cases import RECIPES

NAN = float("nan")


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            from dataclasses import replace
            from jaxrl.losses import Ratio, clipped, grpo, objective, over_anchor
            from jaxrl.losses import reinforce, token_sum, with_terms

            def token(*, ratio: Ratio = over_anchor, factor: float = 1.0, label: str = ""):
                return factor * clipped(ratio)
            def reduced():
                return objective(reinforce(), token_sum)
            def recipe():
                return replace(with_terms(grpo(), kl=0.5), advantages=mine)
            def mine(rewards, groups):
                return rewards
            def nothing():
                return None
            """
        )
    )
    return path


def test_recipe_with_parts_by_name():
    recipe = build("grpo", {"kl": 1, "kl_estimator": "k3+", "ratio": "shadowed", "dual_clip": 3})
    assert recipe.objective.needs == {"reference", "shadow"}
    assert recipe.advantages is advantages.group_relative


def test_advantage_replaces_the_recipes_own(user_file):
    assert build("grpo", {}, advantage="centred").advantages is advantages.centred
    own = build("grpo", {}, advantage=f"{user_file}:mine").advantages
    assert own([1.0], [0]) == [1.0]


def test_losses_that_accept_single_answers(user_file):
    alone = {
        name for name in recipes.__all__ if not is_marked(RECIPES[name].advantages, within_group)
    }
    assert alone == {"ppo", "reinforce_pp", "remax", "vapo"}
    alone = {
        name
        for name in estimators.__all__
        if not is_marked(getattr(estimators, name), within_group)
    }
    assert alone == {"reinforce_pp", "remax"}
    assert not is_marked(build("grpo", {}, advantage=f"{user_file}:mine").advantages, within_group)
    assert is_marked(build(f"{user_file}:token", {}).advantages, within_group)


def test_what_a_users_function_may_return(user_file):
    for name, needs in (("token", {"anchor"}), ("reduced", set()), ("recipe", {"reference"})):
        recipe = build(f"{user_file}:{name}", {})
        assert isinstance(recipe, Recipe)
        assert isinstance(recipe.objective, Objective)
        assert recipe.objective.needs == needs
    assert recipe.advantages.__name__ == "mine"
    assert build(f"{user_file}:token", {"ratio": "on_policy", "factor": 2}).objective.needs == set()


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gropo", {}, "no 'gropo' for this key; did you mean grpo"),
        ("gpro", {}, "did you mean grpo"),
        ("zzz", {}, "it has .*grpo.*vespo"),
        ("grpo", {"clip_hihg": 0.2}, "loss.clip_hihg.*did you mean clip_high"),
        ("grpo", {"zzz": 0.2}, "loss.zzz.*clip_low, clip_high, dual_clip, cap, ratio, corr"),
        ("dr_grpo", {}, "loss.max_length is missing"),
        ("dr_grpo", {"max_length": 8.5}, "loss.max_length = 8.5: expected int"),
        ("grpo", {"kl": "much"}, "loss.kl = 'much': expected float"),
        ("grpo", {"kl": True}, "loss.kl = True: expected float"),
        ("grpo", {"dual_clip": "3"}, "loss.dual_clip = '3': expected float$"),
        ("grpo", {"ratio": "none"}, "loss.ratio = 'none': use one of on_policy, over_anchor"),
        ("grpo", {"kl": "none"}, "loss.kl = 'none': expected float$"),
        ("grpo", {"ratio": "sampler"}, "loss.ratio = 'sampler': use one of on_policy, over_anchor"),
        ("grpo", {"kl_estimator": 3}, r"loss.kl_estimator = 3: use one of k1, k2, k3, k1\+, k3\+"),
        ("grpo", {"clip_low": 2.0}, r"loss\.clip_low = 2\.0: clipped: low=2\.0 must lie in"),
        (
            "grpo",
            {"kl": -1, "clip_low": 0.1},
            r"^loss\.name = 'grpo', loss\.kl = -1: kl=-1 must be",
        ),
        ("grpo", {"rejection": "veto + token_tis"}, "token_tis .* rejects no token; name it"),
        ("grpo", {"rejection": "sequence_tis_normalized"}, "rejects no token"),
        ("grpo", {"dual_clip": NAN}, "dual=nan must exceed"),
        ("grpo", {"kl": NAN}, "kl=nan must be >= 0"),
        ("grpo", {"entropy": -0.1}, r"entropy=-0\.1 must be >= 0"),
        ("grpo", {"entropy": 2.0, "entropy_target": 0.2}, r"entropy=2\.0 must be in \[0, 1\]"),
        ("grpo", {"entropy_target": 0.2, "entropy_step": -1.0}, r"entropy_step=-1\.0 must be > 0"),
        ("grpo", {"positive_nll": -1.0}, r"positive_nll=-1\.0 must be >= 0"),
        ("grpo", {"balance": -1.0}, r"balance=-1\.0 must be >= 0"),
        ("ppo", {"lam": 2.0}, r"lam=2\.0 must be in \[0, 1\]"),
        ("ppo", {"value_lam": -1.0}, r"value_lam=-1\.0 must be in"),
        ("ppo", {"gamma": -1.0}, r"gamma=-1\.0 must be in"),
        ("ppo", {"value_clip": NAN}, "value_loss: clip=nan must be > 0"),
        ("reinforce_pp", {"gamma": 1.5}, r"gamma=1\.5 must be in"),
        ("prime", {"drift": -1.0}, r"drift=-1\.0 must be >= 0"),
        ("sapo", {"negative": NAN}, "soft_gated: negative=nan must be > 0"),
        ("gmpo", {"clip_low": NAN}, "geometric_clipped: low=nan must be >= 0"),
        ("vespo", {"k_positive": NAN}, "k and lam must be > 0"),
        ("opsm", {"delta": NAN}, "off_policy_negatives: delta=nan must be > 0"),
    ],
)
def test_errors_name_the_key_and_the_fix(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        build(name, parameters)


def test_run_fills_in_a_recipes_parameters():
    _, batch = one_sequence(advantages=[1.0, 2.0], logprobs=[-1.0, -1.0])
    for parameters, length in (({}, 8), ({"max_length": 5}, 5)):
        recipe = build("dr_grpo", parameters, known={"max_length": 8, "clip_low": 0.5})
        assert recipe.objective.denominator(batch) == length
    assert build("grpo", {}, known={"max_length": 8}).objective.denominator(batch) == 1


def test_aggregation_length_comes_from_the_run():
    _, batch = one_sequence(advantages=[1.0, 2.0], logprobs=[-1.0, -1.0])
    recipe = build("gspo", {"aggregation": "fixed_length"}, known={"max_length": 8})
    assert recipe.objective.denominator(batch) == 8
    assert recipe.objective.aggregation.weights(batch).sum() == 2
    with pytest.raises(ValueError, match="'fixed_length' needs max_length"):
        build("gspo", {"aggregation": "fixed_length"})


def test_advantage_eps_can_be_chosen():
    rewards, groups = np.array([1.0, 0.0]), np.zeros(2, int)
    for more in ({}, {"advantage": "group_relative"}):
        recipe = build("dapo", {"advantage_eps": 1.0}, **more)
        found = advantages.estimate(
            recipe.advantages,
            advantages.Outcomes(
                rewards=rewards, groups=groups, action_masks=[np.ones(1, bool)] * 2
            ),
        )
        np.testing.assert_allclose(found, [0.5 / (0.5**0.5 + 1), -0.5 / (0.5**0.5 + 1)], rtol=1e-6)
        assert is_marked(recipe.advantages, within_group)
    with pytest.raises(ValueError, match="the advantage centred takes no eps"):
        build("dr_grpo", {"advantage_eps": 1.0}, known={"max_length": 8})


def test_errors_of_users_functions(user_file):
    with pytest.raises(ValueError, match="returned NoneType, expected a Recipe"):
        build(f"{user_file}:nothing", {})
    with pytest.raises(ValueError, match=r"loss\.label = 3: expected str"):
        build(f"{user_file}:token", {"label": 3})
    with pytest.raises(ValueError, match=r"loss\.advantage"):
        build("grpo", {}, advantage="group_relativ")
