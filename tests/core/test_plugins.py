import builtins
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.advantages import estimators
from jaxrl.core.plugins import check_parameters, load_function, naming_keys
from jaxrl.environments import builtin as environments
from jaxrl.environments.rewards import builtin as rewards
from jaxrl.environments.tools import builtin as tools
from jaxrl.losses import recipes


def recipe(required, *, clip_low=0.2, clip_high=0.2):
    return required, clip_low, clip_high


def test_parameters_are_checked_by_name():
    check_parameters(recipe, {"required": 1, "clip_low": 0.1}, key="loss")
    with pytest.raises(ValueError, match=r"loss\.clip_hi: .*did you mean clip_high\?"):
        check_parameters(recipe, {"required": 1, "clip_hi": 0.3}, key="loss")
    with pytest.raises(ValueError, match=r"loss\.required is missing"):
        check_parameters(recipe, {}, key="loss")
    check_parameters(lambda **kw: kw, {"anything": 1}, key="loss")


def test_an_unknown_name_is_not_answered_with_a_module_of_jaxrl():
    keys = {
        "loss.name": (recipes, "gpro", "did you mean grpo?"),
        "loss.advantage": (estimators, "gae2", "it has "),
        "reward.path": (rewards, "numeric_mach", "did you mean numeric_match?"),
        "environment.name": (environments, "agents", "did you mean agent?"),
        "environment.tools": (tools, "bash", "it has calculator, python"),
        "environment.game": (None, "wordle", "key; to name your own function, write"),
    }
    for key, (builtin, name, hint) in keys.items():
        with pytest.raises(ValueError, match=re.escape(f"{key} = {name!r}: ")) as error:
            load_function(name, builtin=builtin, key=key)
        assert hint in str(error.value)
        assert "jaxrl." not in str(error.value)


@pytest.mark.parametrize("content", ["import sys; sys.exit(0)", "raise SystemExit", "1 / 0", "("])
def test_failing_import_names_the_file(tmp_path, content):
    (tmp_path / "mine.py").write_text(content)
    for _ in range(2):  # it is not half imported either
        with pytest.raises(
            ValueError, match=r"^loss\.name = '.*mine\.py:f': importing .* failed: "
        ):
            load_function(f"{tmp_path}/mine.py:f", builtin=builtins, key="loss.name")


def test_errors_name_config_keys():
    def make(given):
        if not given.get("low", 0.2) < given.get("high", 0.8) or given.get("gone"):
            raise given.get("gone") or ValueError("clip: low >= high")
        return given

    def named(**given):
        with pytest.raises(ValueError, match=r"loss\.name") as error:
            naming_keys(make, given, key="loss", name="clip")
        return str(error.value)

    assert naming_keys(make, {"low": 0.1}, key="loss", name="clip") == {"low": 0.1}
    assert named(low=0.9, size=3) == "loss.name = 'clip', loss.low = 0.9: clip: low >= high"
    both = "loss.name = 'clip', loss.low = 0.7, loss.high = 0.3: clip: low >= high"
    assert named(low=0.7, size=3, high=0.3) == both
    exits = named(gone=SystemExit(0), size=3)
    assert exits == "loss.name = 'clip', loss.gone = SystemExit(0): SystemExit(0)"


def test_a_function_without_known_parameters_is_named():
    with pytest.raises(ValueError, match=r"loss\.name: the parameters of .* are unknown"):
        check_parameters(dict, {"a": 1}, key="loss")


def test_type_checking_annotations_are_accepted():
    def mine(*, size: "Unknown" = 1):  # noqa: F821
        return size

    assert check_parameters(mine, {"size": 2}, key="loss") is None
    with pytest.raises(ValueError, match=r"loss\.sice: .*did you mean size"):
        check_parameters(mine, {"sice": 2}, key="loss")


def test_file_is_executed_once_for_threads_that_load_it_together(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(0.2)\ndef late():\n    return object()\n")

    def load(_):
        return load_function(f"{path}:late", builtin=None, key="reward.path")

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(load, range(4)))) == 1
