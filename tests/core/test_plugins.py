import pytest

from jaxrl.core.plugins import check_parameters


def recipe(required, *, clip_low=0.2, clip_high=0.2):
    return required, clip_low, clip_high


def test_parameters_are_checked_by_name():
    check_parameters(recipe, {"required": 1, "clip_low": 0.1}, key="loss")
    with pytest.raises(ValueError, match=r"loss\.clip_hi: .*did you mean clip_high\?"):
        check_parameters(recipe, {"required": 1, "clip_hi": 0.3}, key="loss")
    with pytest.raises(ValueError, match=r"loss\.required is missing"):
        check_parameters(recipe, {}, key="loss")
    check_parameters(lambda **kw: kw, {"anything": 1}, key="loss")
