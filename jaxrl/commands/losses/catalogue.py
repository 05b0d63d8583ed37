"""The available recipes, terms, estimators and parts, read from the code.

A recipe's docstring is a summary that names its paper, and the sections "Formula:", "Args:",
"Example:" and "Raises:". `grpo` describes the parameters that a recipe's docstring leaves out.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl.advantages import estimators
from jaxrl.config.toml_file import one_line
from jaxrl.losses import Terms, aggregation, from_config, presets, ratios, recipes


class Parameter(NamedTuple):
    """A key of the [loss] table; `default` is spelled as in a config, None if it is required."""

    name: str
    default: str | None
    meaning: str


class Entry(NamedTuple):
    """A recipe, an advantage estimator, or a part."""

    name: str
    summary: str
    formula: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    @property
    def papers(self) -> tuple[str, ...]:
        """Lists the arXiv ids in the summary, the algorithm's own first."""
        return tuple(dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{5})", self.summary)))


def list_recipes() -> list[Entry]:
    """Describes every named recipe, sorted by name."""
    return [describe(getattr(recipes, name)) for name in dir(recipes)]


def list_estimators() -> list[Entry]:
    """Describes every named advantage estimator, sorted by name."""
    return [describe(getattr(estimators, name)) for name in sorted(estimators.__all__)]


def list_terms() -> tuple[Parameter, ...]:
    """Describes the keys shared by every recipe."""
    return describe(Terms).parameters


def list_parts() -> dict[str, list[Entry]]:
    """Describes the named parts of each kind: ratios, levels, corrections, ..."""
    texts = [text for module in (aggregation, presets, ratios) for text in _texts_of(module)]
    return {
        kind.__name__: [
            describe(part)._replace(name=name)
            if inspect.isfunction(part)
            else Entry(name, next(text for value, text in texts if value is part), (), ())
            for name, part in parts.items()
        ]
        for kind, parts in from_config.PARTS.items()
    }


def _texts_of(module: ModuleType) -> list[tuple[Any, str]]:
    """Pairs a module's variables with the strings below them, which Python discards."""
    body = ast.parse(inspect.getsource(module)).body
    return [
        (getattr(module, target.id), one_line(value))
        for assignment, text in itertools.pairwise(body)
        if isinstance(assignment, ast.Assign)
        and isinstance(target := assignment.targets[0], ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(value := text.value.value, str)
    ]


def describe(function: Callable[..., Any]) -> Entry:
    """Describes a function from its docstring and signature."""
    summary, text = _sections(function)
    meanings = _meanings(recipes.grpo) | _meanings(function)
    declared = inspect.signature(function).parameters.values()
    return Entry(
        name=getattr(function, "__name__", str(function)),
        summary=one_line(re.sub(r"Raises as .*", "", summary)),
        formula=tuple(
            one_line(line)
            for line in re.findall(r"^  (\S.*(?:\n {4}.*)*)", text.get("Formula", ""), flags=re.M)
        ),
        parameters=tuple(
            Parameter(p.name, _default(p), one_line(meanings.get(p.name, "")))
            for p in declared
            if p.kind is p.KEYWORD_ONLY
        ),
    )


def _sections(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns the summary of a docstring, and its sections by title."""
    summary, *found = re.split(
        r"^(Formula|Args|Attributes|Example|Raises):\n", inspect.getdoc(function) or "", flags=re.M
    )
    return summary, dict(zip(found[::2], found[1::2], strict=True))


def _meanings(function: Callable[..., Any]) -> dict[str, str]:
    sections = _sections(function)[1]
    text = sections.get("Args") or sections.get("Attributes", "")
    return dict(re.findall(r"^  (\w+): ((?:.|\n {4})*)", text, flags=re.M))


def _default(parameter: inspect.Parameter) -> str | None:
    if parameter.default is parameter.empty:
        return None
    if parameter.default is None:
        return "none"
    for parts in from_config.PARTS.values():
        for name, part in parts.items():
            if part is parameter.default:
                return name
    return str(parameter.default)
