"""`jaxrl losses` and the pages about losses against the code."""

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.advantages import Outcomes, estimate
from jaxrl.builders.recipe import make_recipe
from jaxrl.cli import main
from jaxrl.commands.losses import catalogue
from jaxrl.commands.losses.command import markdown
from jaxrl.config.toml_file import validate
from jaxrl.config.training import Config
from jaxrl.core.batch import TokenBatch
from jaxrl.losses import (
    Scores,
    Weights,
    build,
    clipped,
    objective,
    over_sampler,
    recipes,
    reinforce,
    token_mean,
    value_loss,
)
from jaxrl.losses.from_config import PARTS
from tests.documented import undocumented
from tests.losses.cases import OBJECTIVES, RECIPES, TERMS, lay_out, random_sequences

DOCS = Path(__file__).parents[2] / "docs"
OWN_LOSS = (DOCS / "own_loss.md").read_text()


def test_document_is_up_to_date():
    hint = "run python scripts/make_losses_doc.py"
    assert markdown(catalogue.list_recipes()) in (DOCS / "reference" / "recipes.md").read_text(), (
        hint
    )


@pytest.mark.parametrize("entry", catalogue.list_recipes(), ids=lambda entry: entry.name)
def test_every_recipe_is_described(entry):
    function = getattr(recipes, entry.name)
    assert entry.papers or "et al." in entry.summary
    assert entry.formula
    assert [p.name for p in entry.parameters] == list(inspect.signature(function).parameters)
    for p in entry.parameters:
        assert p.meaning, p.name
        assert any(p.name in line for line in entry.formula) or p.name in inspect.getsource(
            function
        ), p.name


def test_every_term_and_estimator_is_described():
    assert all(p.meaning for p in catalogue.list_terms())
    assert all(entry.papers for entry in catalogue.list_estimators())


def test_every_part_is_described():
    parts = catalogue.list_parts()
    assert [list(names) for names in PARTS.values()] == [
        [part.name for part in kind] for kind in parts.values()
    ]
    texts = [part.summary for kind in parts.values() for part in kind]
    assert all(texts)
    assert len(set(texts)) == len(texts)
    (icepop,) = (part.summary for part in parts["Weights"] if part.name == "icepop")
    assert icepop == "w where .5 <= w <= 5 and 0 elsewhere (IcePop, arXiv:2510.18855)."


def test_shown_defaults_are_valid_in_a_config():
    for entry in catalogue.list_recipes():
        own = {p.name: p for p in (*catalogue.list_terms(), *entry.parameters)}  # vapo takes a term
        shown = [p for p in own.values() if p.default is not None]
        lines = "\n".join(f"{p.name} = {_toml(p.default)}" for p in shown)
        config = validate(
            Config,
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "reward": {"path": ["exact_match"]},
                "loss": {"name": entry.name} | tomllib.loads(lines),
            },
        )
        plain = build(entry.name, {p.name: 8 for p in entry.parameters if p.default is None})
        assert make_recipe(config).objective.needs == plain.objective.needs


def _toml(text):
    return text if re.fullmatch(r"[\d.e+-]+|inf", text) else f'"{text}"'


def test_command(capsys):
    assert main(["losses", "gspo"]) == 0
    shown = capsys.readouterr().out
    assert "arXiv:2507.18071" in shown
    assert "clip_high = 0.0004" in shown
    assert "rloo" not in shown
    assert "entropy_target" in shown
    assert main(["losses"]) == 0
    assert all(f"\n{name}\n" in "\n" + capsys.readouterr().out for name in ("bnpo",))
    assert main(["losses", "gppo"]) == 1


def test_every_loss_metric_is_documented():
    sequences = random_sequences(0)
    scores, batch = lay_out(sequences, [[i] for i in range(len(sequences))])
    losses = [*TERMS.values()]
    losses += [clipped(over_sampler, dual=2.0, cap=2.0), value_loss()]
    scores, batch = (
        scores.replace(values=scores.anchor),
        batch.replace(values=batch.advantages, returns=batch.advantages),
    )
    goals = [*OBJECTIVES.values(), *(recipe.objective for recipe in RECIPES.values())]
    goals += [objective(weights * reinforce(), token_mean) for weights in PARTS[Weights].values()]

    def metrics():
        found = [loss.apply(scores, batch)[1] for loss in losses]
        for goal in goals:
            whole, before = goal.survey(scores, batch)
            found += [before, goal.total(whole, batch)[1]]
        return found

    found = jax.eval_shape(metrics)
    assert not undocumented({name for metrics in found for name in metrics})


@pytest.fixture
def files(tmp_path):
    """The document's Python blocks as files."""
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", OWN_LOSS, re.DOTALL)
    assert [name for name, _ in blocks] == ["surrogate", "correction", "from_logprobs", "advantage"]
    for name, code in blocks:
        (tmp_path / f"{name}.py").write_text(code)
        for function in re.split(r"\n\n\n(?=def )", code)[1:]:
            assert len(function.strip().splitlines()) < 10
    return tmp_path


def test_document_lists_every_field():
    rows = re.findall(r"^\| `(scores|batch)\.(\w+)` \| (\w+)\[", OWN_LOSS, re.MULTILINE)
    for name, kind in (("scores", Scores), ("batch", TokenBatch)):
        documented = [field for owner, field, _ in rows if owner == name]
        assert documented == [field.name for field in dataclasses.fields(kind)]


def test_losses_of_the_document(files):
    """Without movement or mismatch they equal REINFORCE."""
    sequences = random_sequences(0, spread=0.0)
    scores, batch = lay_out(sequences, [[i] for i in range(len(sequences))])
    plain = objective(reinforce(), token_mean)
    own = [
        build(f"{files}/surrogate.py:saturating", {"width": 0.3}).objective,
        build(f"{files}/correction.py:half_corrected", {"aggregation": "token_mean"}).objective,
        build(f"{files}/from_logprobs.py:anchored", {"beta": 0.5}).objective,
    ]
    assert [reduced.needs for reduced in own] == [set(), {"anchor"}, {"reference"}]

    @jax.jit
    def gradients(logprobs):
        return [
            jax.grad(lambda lp, o=o: o.total(scores.replace(logprobs=lp), batch)[0])(logprobs)
            for o in (plain, *own)
        ]

    expected, *found = gradients(scores.logprobs)
    for gradient in found:
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_advantages_of_the_document(files):
    outcomes = Outcomes(
        rewards=np.array([1.0, 2.0, 5.0, np.nan, 7.0]),
        groups=np.array([0, 0, 0, 1, 1]),
        action_masks=[np.ones(n, bool) for n in (1, 2, 4, 3, 7)],
    )
    for name, expected in (
        ("above_median", [-1.0, 0.0, 1.0, 0.0, 0.0]),
        ("per_token", [1.0, 1.0, 1.25, 0.0, 1.0]),
    ):
        estimator = build("grpo", {}, advantage=f"{files}/advantage.py:{name}").advantages
        np.testing.assert_allclose(estimate(estimator, outcomes), expected)
