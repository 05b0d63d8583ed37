"""Losses named in a config: a built-in recipe or a user's function, with its parameters."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl import advantages
from jaxrl.advantages import estimators
from jaxrl.core import plugins
from jaxrl.losses import aggregation, presets, ratios, recipes, regularizers, rejections
from jaxrl.losses.algebra import TokenLoss, Weights, both
from jaxrl.losses.objectives import Aggregation, Objective, objective
from jaxrl.losses.ratios import Level, Ratio
from jaxrl.losses.recipe import Recipe, Terms, with_terms
from jaxrl.losses.regularizers import KLEstimator
from jaxrl.losses.rejections import Divergence
from jaxrl.losses.shape_check import blaming, check_shapes

# TRL's names of parameters.
_RENAMED = {"beta": "kl", "epsilon": "clip_low", "epsilon_high": "clip_high"}


def _named(module: types.ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


PARTS: Mapping[Any, Mapping[str, Any]] = {
    Ratio: _named(ratios, "on_policy over_anchor over_sampler shadowed"),
    Level: _named(ratios, "token sequence geometric product"),
    Weights: _named(
        presets,
        "token_tis sequence_tis token_tis_normalized sequence_tis_normalized sequence_mis "
        "sequence_mis_3 icepop geometric_mask k3_mask k2_mask k3_sum_mask k2_sum_mask veto",
    ),
    Aggregation: _named(  # `_terms` calls fixed_length with the longest completion
        aggregation,
        "token_mean sequence_mean_token_mean sequence_mean_token_sum token_sum fixed_length",
    ),
    KLEstimator: {
        **_named(regularizers, "k1 k2 k3"),
        "k1+": regularizers.k1_plus,
        "k3+": regularizers.k3_plus,
    },
    Divergence: _named(rejections, "total_variation binary_kl"),
}
"""The values that a config gives by name, by the parameter's type."""


def build(
    name: str,
    parameters: Mapping[str, Any],
    *,
    advantage: str | None = None,
    known: Mapping[str, Any] = types.MappingProxyType({}),
) -> Recipe:
    """Builds the recipe that a config describes.

    Example:
      >>> build("gspo", {"level": "geometric", "kl": 0.001}, advantage="leave_one_out")
      Recipe(objective(clipped(geometric(over_sampler), low=0.0003, high=0.0004)
                       + 0.001 * kl_penalty(k3), sequence_mean_token_mean), leave_one_out)

    Args:
      name: a function of `losses.recipes`, `path/to/file.py:function` or `package.module:function`.
        It takes keyword parameters and returns a Recipe, an Objective (the advantages are then
        `group_relative`) or a TokenLoss (which `token_mean` then reduces).
      parameters: its keyword arguments, and further attributes of `recipe.Terms`. Ratios, levels,
        corrections, aggregations and KL estimators are given by name.
      advantage: a function of `jaxrl.advantages.estimators` or the user's, in place of the recipe's
        estimator.
      known: values of the run, such as max_length, for required parameters of these names that
        `parameters` leaves out.

    Raises:
      ValueError: for an unknown name (the nearest one is shown), an unknown, missing or mistyped
        parameter, a function that returns something else, parts that do not go together, or a loss
        that cannot be traced. An error of a user's function is chained to it.
    """
    function = plugins.load_function(name, builtin=recipes, key="loss.name")
    estimator = None
    if advantage is not None:
        estimator = plugins.load_function(advantage, builtin=estimators, key="loss.advantage")

    def make(given: Mapping[str, Any]) -> Recipe:
        declared = plugins.declared_parameters(function, key="loss")
        needed = [key for key, p in declared.items() if p.default is p.empty]
        given = {key: known[key] for key in needed if key in known} | dict(given)
        own, more = plugins.divide_parameters(function, Terms, given, key="loss", renamed=_RENAMED)
        keywords = loss_arguments(function, own)
        with blaming(function, name=name):
            made = function(**keywords)
        recipe = _as_recipe(made, name=name)
        if estimator is not None:
            recipe = dataclasses.replace(recipe, advantages=estimator)
        recipe = with_terms(recipe, **_terms(more, known={**known, **given}))
        with blaming(function, name=name):
            check_shapes(recipe)
        return recipe

    return plugins.naming_keys(make, parameters, key="loss", name=name)


def _terms(values: Mapping[str, Any], *, known: Mapping[str, Any]) -> dict[str, Any]:
    rejection = str(values.get("rejection"))
    if truncating := [name for name in rejection.split(" + ") if "_tis" in name]:
        raise ValueError(
            f"rejection: {truncating[0].strip()} truncates weights and rejects no token; name it "
            "in loss.correction, or write a rejection such as geometric_mask"
        )
    terms = loss_arguments(Terms, values)
    if terms.get("aggregation") is aggregation.fixed_length:
        if "max_length" not in known:
            raise ValueError(
                "loss.aggregation = 'fixed_length' needs max_length, the longest completion, which "
                "a run knows; outside a run write with_terms(recipe, aggregation=fixed_length(8))"
            )
        terms["aggregation"] = aggregation.fixed_length(known["max_length"])
    return terms


def loss_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts keyword arguments of the table [loss] to the function's annotations: names become
    parts, "none" becomes None where that is allowed; numbers, texts and booleans stay.

    Example:
      >>> loss_arguments(recipes.grpo, {"kl": 0.001, "ratio": "over_anchor"})
      {'kl': 0.001, 'ratio': over_anchor}

    Raises:
      ValueError: for an unknown name or a value of another type; the message names the key.
    """
    declared = plugins.declared_parameters(function, key="loss")
    return {
        key: _argument(value, declared[key].annotation if key in declared else Any, key=key)
        for key, value in values.items()
    }


def _argument(value: Any, annotation: Any, *, key: str) -> Any:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    if value == "none" and types.NoneType in kinds:  # TOML has no null
        return None
    if kinds[0] in PARTS:
        return _part(value, kinds[0], key=key)
    if not any(_fits(value, kind) for kind in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise ValueError(f"loss.{key} = {value!r}: expected {expected}")
    return value


def _part(value: Any, kind: Any, *, key: str) -> Any:
    parts = PARTS[kind]
    names = [name.strip() for name in str(value).split(" + ")] if kind is Weights else [value]
    for name in names:
        if name not in parts:
            raise ValueError(f"loss.{key} = {value!r}: use one of {', '.join(parts)}")
    return functools.reduce(both, [parts[name] for name in names])


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
