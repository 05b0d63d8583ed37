"""Keys of the table `environment`."""

import pytest

from jaxrl.builders.environment import load_environment
from jaxrl.config.environment import EnvironmentConfig


def test_a_misspelt_key_of_the_environment_leads_to_the_right_one():
    for wrong, right in (("max_turn", "max_turns"), ("call_cots", "call_cost")):
        config = EnvironmentConfig.model_validate({"name": "agent", wrong: 1})
        with pytest.raises(ValueError, match=rf"environment\.{wrong}: .*; did you mean {right}\?"):
            load_environment(config)
