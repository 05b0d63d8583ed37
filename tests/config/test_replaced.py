"""Configs of earlier versions: the error of an old key names what replaced it."""

import re

import pytest

from jaxrl.commands.generate import GenerateConfig
from jaxrl.commands.serve.command import ServeConfig
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.environment import EnvironmentConfig
from jaxrl.config.replaced import REPLACED
from jaxrl.config.toml_file import ConfigError, keys, load, validate
from jaxrl.config.training import Config

SCHEMAS = Config, DoctorConfig, GenerateConfig, ServeConfig
KNOWN = {name for schema in SCHEMAS for name in keys(schema)}


@pytest.mark.parametrize("key", REPLACED)
def test_an_old_key_names_what_replaced_it(key):
    with pytest.raises(ConfigError) as error:
        load(Config, overrides=[("model.path", "m"), ("data.path", "d"), (key, "1")])
    assert f"{key} is not a key any more: {REPLACED[key]}" in str(error.value)
    for named in re.findall(r"[a-z]+\.[a-z_]+(?!\w*[/.(])", REPLACED[key]):
        assert named in KNOWN or named == "alarms.py"


def test_an_old_key_in_a_file_is_explained(tmp_path):
    (tmp_path / "old.toml").write_text("[probe]\nlow = 0.1\n[sampling]\ntop_p = 0.9\n")
    with pytest.raises(ConfigError) as error:
        load(Config, file=tmp_path / "old.toml")
    assert "use probe.clip_range = [LOW, HIGH]" in str(error.value)
    assert "only `jaxrl generate` truncates it" in str(error.value)


def test_an_environment_of_the_users_own_may_take_such_a_parameter():
    table = {"name": "mine.py:Mine", "weight": 2.0}
    assert validate(EnvironmentConfig, table).parameters == {"weight": 2.0}
