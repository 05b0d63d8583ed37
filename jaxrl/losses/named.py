"""Losses named in a config: a recipe of ours or a function of the user's, with its parameters."""

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxrl import advantages, plugins
from jaxrl.advantages import groups
from jaxrl.losses import aggregation, ratios, recipes, regularizers
from jaxrl.losses.algebra import Aggregation, Objective, TokenLoss, objective
from jaxrl.losses.ratios import Ratio
from jaxrl.losses.recipes import Recipe
from jaxrl.losses.regularizers import KLEstimator

# A parameter annotated with one of these types takes one of these names in a config.
_PARTS: Mapping[Any, Mapping[str, Any]] = {
    Ratio: {
        "on_policy": ratios.on_policy,
        "over_anchor": ratios.over_anchor,
        "over_sampler": ratios.over_sampler,
        "shadowed": ratios.shadowed,
    },
    Aggregation: {
        "token_mean": aggregation.token_mean,
        "sequence_mean_token_mean": aggregation.sequence_mean_token_mean,
        "sequence_mean_token_sum": aggregation.sequence_mean_token_sum,
        "token_sum": aggregation.token_sum,
    },
    KLEstimator: {
        "k1": regularizers.k1,
        "k2": regularizers.k2,
        "k3": regularizers.k3,
        "k1+": regularizers.k1_plus,
        "k3+": regularizers.k3_plus,
    },
}


def build(name: str, parameters: Mapping[str, Any], *, advantage: str | None = None) -> Recipe:
    """The recipe that a config describes.

    Args:
      name: a function of `losses.recipes`, `path/to/file.py:function` or `package.module:function`.
        The function takes keyword parameters and returns a Recipe, or an Objective (whose
        advantages are then `group_relative`), or a TokenLoss (also reduced by `token_mean`).
      parameters: its keyword arguments. Ratios, aggregations and KL estimators are given by name.
      advantage: a function of `jaxrl.advantages`, or one of the user's named as above, that
        replaces the recipe's own.

    Raises:
      ValueError: for an unknown name (the nearest one is shown), an unknown, missing or mistyped
        parameter (those that exist are listed), or a function that returns something else.
    """
    function = plugins.load_function(name, builtin=recipes, key="loss.name")
    plugins.check_parameters(function, parameters, key="loss")
    declared = inspect.signature(function, eval_str=True).parameters
    arguments = {
        key: _argument(value, declared[key].annotation if key in declared else Any, key=key)
        for key, value in parameters.items()
    }
    recipe = _as_recipe(function(**arguments), name=name)
    if advantage is None:
        return recipe
    estimator = plugins.load_function(advantage, builtin=groups, key="loss.advantage")
    return recipe._replace(advantages=estimator)


def _argument(value: Any, annotation: Any, *, key: str) -> Any:
    if annotation in _PARTS:
        parts = _PARTS[annotation]
        if value not in parts:
            raise ValueError(f"loss.{key} = {value!r}: use one of {', '.join(parts)}")
        return parts[value]
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    if not any(_fits(value, kind) for kind in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise ValueError(f"loss.{key} = {value!r}: expected {expected}")
    return value


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind not in (bool, str, types.NoneType) or isinstance(value, kind)


def _as_recipe(result: Any, *, name: str) -> Recipe:
    if isinstance(result, Recipe):
        return result
    if isinstance(result, TokenLoss):
        result = objective(result, aggregation.token_mean)
    if isinstance(result, Objective):
        return Recipe(result, advantages.group_relative)
    raise ValueError(
        f"loss.name = {name!r}: the function returned {type(result).__name__}, "
        "expected a Recipe, an Objective or a TokenLoss"
    )
