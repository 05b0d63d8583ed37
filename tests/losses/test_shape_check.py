"""What is wrong with a loss of one's own is said when the config is read."""

import pytest

from jaxrl.cli import main
from jaxrl.losses import build

OWN = """
from dataclasses import replace
import jax.numpy as jnp
from jaxrl.losses import Critic, Need, grpo, kl_penalty, objective, reinforce, require
from jaxrl.losses import token_loss, token_mean
from jaxrl.core.metrics import Mean, masked_mean

def reduced():
    return reinforce() + token_loss(lambda s, b: (-(s.logprobs * b.advantages).sum(-1), {}))
def alone():
    return token_loss(lambda s, b: -s.logprobs)
def undeclared():
    def apply(s, b):
        apart = s.logprobs - s.reference
        return apart, {}
    return token_loss(apply)
def required():
    return token_loss(lambda s, b: (require(s, Need.ENTROPY), {}))
def array():
    return token_loss(lambda s, b: (s.logprobs, {"mine": s.logprobs.mean()}))
def wide():
    return token_loss(lambda s, b: (s.logprobs, {"mine": Mean(s.logprobs, b.advantages)}))
def critic():
    goal = objective(token_loss(lambda s, b: (s.values.sum(), {}), Need.VALUES), token_mean)
    return replace(grpo(), critic=Critic(goal, lambda outcomes: []))
def construction():
    return kl_penalty() + 0.1
def right():
    def apply(s, b):
        apart = require(s, Need.REFERENCE) - s.logprobs
        return apart**2, {"mine": masked_mean(apart, b.action_mask)}
    return token_loss(apply, Need.REFERENCE)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("reduced", r"the loss has shape \(2,\), expected one number per token \(2, 4\)"),
        ("alone", "`apply` returned an array, expected a pair"),
        ("undeclared", r"NoneType.*Need\.REFERENCE.*own\.py, line 14\)"),
        ("required", r"the loss reads scores.entropy.*declare Need.ENTROPY"),
        ("array", "the metric 'mine' is .*expected a Mean of two scalars: .*masked_mean"),
        ("wide", "the metric 'mine' is Mean.*expected a Mean of two scalars"),
        ("critic", r"the loss has shape \(\), expected"),
        ("construction", r"TypeError: cannot add 0\.1 to a loss: .*own\.py, line 27\)"),
    ],
)
def test_mistakes_name_the_loss(own, function, message):
    with pytest.raises(ValueError, match=message) as error:
        build(f"{own}:{function}", {})
    assert str(error.value).startswith(f"loss.name = '{own}:{function}': ")
    assert error.value.__cause__ is not None


def test_config_terms_get_their_needs(own):
    """With loss.kl the reference is scored, whoever asked for it."""
    assert build(f"{own}:undeclared", {"kl": 0.1}).objective.needs == {"reference"}
    assert build(f"{own}:right", {}).objective.needs == {"reference"}


def test_config_command_finds_them(own, tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(
        '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[reward]\npath = ["numeric_match"]\n'
        f'[loss]\nname = "{own}:alone"\n'
    )
    assert main(["config", str(config)]) == 1
    assert "`apply` returned an array" in capsys.readouterr().err
