"""TRL's names: every one leads to a key that exists, and the documentation has them all."""

import re
from pathlib import Path

import pytest

from jaxrl.commands.losses import catalogue
from jaxrl.config import trl
from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.toml_file import ConfigError, keys, load
from jaxrl.config.training import Config
from jaxrl.losses import from_config

PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"
SCHEMAS = (Config, SFTConfig, DPOConfig, RewardModelConfig)


def test_every_key_exists():
    known = {name for schema in SCHEMAS for name in keys(schema)}
    recipes = [p for entry in catalogue.list_recipes() for p in entry.parameters]
    known |= {f"loss.{p.name}" for p in [*catalogue.list_terms(), *recipes]}
    assert {key for renamed in trl.NAMES.values() for key in renamed.keys} <= known


def test_page_has_every_name():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    expected = [
        (name, ", ".join(f"`{key}`" for key in renamed.keys), renamed.note)
        for name, renamed in trl.NAMES.items()
    ]
    assert rows == expected


@pytest.mark.parametrize(
    ("schema", "name", "hint"),
    [
        (Config, "lr", "TRL's lr is optimizer.learning_rate here"),
        (Config, "max_completion_length", "is sampling.max_tokens here"),
        (Config, "beta", "TRL's beta is loss.kl here"),
        (Config, "batch_size", "is train.train_batch here (prompts, over all devices)"),
        (SFTConfig, "batch_size", "is train.batch_size here"),
    ],
)
def test_names_of_trl_on_the_command_line(schema, name, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load(schema, overrides=[(name, "1")])


def test_a_name_of_trl_without_a_key_of_the_command_is_not_answered():
    with pytest.raises(ConfigError) as error:
        load(SFTConfig, overrides=[("num_generations", "1")])
    assert "TRL" not in str(error.value)


@pytest.mark.parametrize(("name", "own"), [("beta", "kl"), ("epsilon", "clip_low")])
def test_names_of_trl_among_parameters_of_the_loss(name, own):
    assert f"loss.{own}" in trl.NAMES[name].keys
    with pytest.raises(ValueError, match=f"loss.{name}: .*did you mean {own}"):
        from_config.build("grpo", {name: 0.1})
