"""Formulas: every part of a loss prints as the expression that makes it, never as an address."""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Base of losses, weights, ratios and aggregations. Comparisons and hashes ignore `formula`."""

    formula: str = dataclasses.field(default="", compare=False)

    def __repr__(self) -> str:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        functions = ", ".join(formula_text(value) for value in values if callable(value))
        return self.formula or f"{type(self).__name__}({functions})"


P = ParamSpec("P")
Part = TypeVar("Part", bound=Formula)


def with_formula(make: Callable[P, Part]) -> Callable[P, Part]:
    """Makes a constructor check the kinds of its arguments and record its call as the formula.

    An argument that is None is left out.

    Example:
      >>> from jaxrl.losses import clipped, over_sampler, product
      >>> clipped(product(over_sampler), high=0.28)
      clipped(product(over_sampler), low=0.2, high=0.28)

    Raises:
      TypeError: when the constructor is called with another kind of part, or with a part's name.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Part:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return make(*args, **kwargs)  # raises, with the name of the function
        bound.apply_defaults()
        arguments = []
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            _check(value, parameter, function=make.__name__)
            if value is not None:
                keyword = f"{name}=" if parameter.kind is parameter.KEYWORD_ONLY else ""
                arguments.append(keyword + formula_text(value))
        formula = f"{make.__name__}({', '.join(arguments)})"
        return dataclasses.replace(make(*args, **kwargs), formula=formula)

    return wrapper


def formula_text(value: Any) -> str:
    """Returns the expression for a value: a part's formula, a function's name.

    Example:
      >>> formula_text(functools.partial(max, default=np.float32(0.5)))
      'partial(max, default=0.5)'
    """
    if isinstance(value, Tracer):
        return str(value.aval)
    if isinstance(value, jax.Array | np.generic) and np.ndim(value) == 0:
        return repr(value.item())
    if isinstance(value, jax.Array | np.ndarray):
        return f"array of shape {value.shape}"
    if isinstance(value, functools.partial):
        named = (f"{name}={formula_text(v)}" for name, v in value.keywords.items())
        return f"partial({', '.join([*map(formula_text, (value.func, *value.args)), *named])})"
    if name := getattr(value, "__qualname__", None):
        return name.replace("<locals>.", "")
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def grouped(part: Formula, *, signs: str = "+*/-") -> str:
    """Returns a part's formula, in parentheses if an operator stands outside of calls.

    Example:
      >>> from jaxrl.losses import entropy_bonus, kl_penalty
      >>> grouped(kl_penalty()), grouped(kl_penalty() + entropy_bonus())
      ('kl_penalty(k3)', '(kl_penalty(k3) + entropy_bonus())')
    """
    text = outside = repr(part)
    inside = None
    while inside != outside:
        inside, outside = outside, re.sub(r"\([^()]*\)", "", outside)
    return f"({text})" if re.search(f" [{signs}] ", outside) else text


_EXAMPLES = {
    "Divergence": "a divergence such as total_variation",
    "KLEstimator": "an estimator such as k3",
    "PairLoss": "a loss of pairs such as sigmoid()",
    "Ratio": "a ratio such as over_sampler",
}


def _check(value: Any, parameter: inspect.Parameter, *, function: str) -> None:
    annotation = parameter.annotation
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    given = f"{function}: {parameter.name}={formula_text(value)}"
    if isinstance(value, str):
        raise TypeError(f"{given} is text; write {value} without quotes")
    if not any(_fits(value, kind) for kind in kinds):
        example = _EXAMPLES.get(kinds[0].__name__, "a function")
        raise TypeError(f"{given} is not a {kinds[0].__name__}; write {example}")


def _fits(value: Any, kind: Any) -> bool:
    if kind is types.NoneType:
        return value is None
    if getattr(kind, "_is_protocol", False):
        return callable(value) and not isinstance(value, Formula)
    return not (isinstance(kind, type) and issubclass(kind, Formula)) or isinstance(value, kind)
