"""The reference of the library's names.

A page of docs/reference holds these markers:

`<!-- names of jaxrl -->`
    a table of the names that a package exports, each linked to its reference
`<!-- exported by jaxrl.losses from jaxrl.losses.ratios -->`
    the reference of the names that a package takes from one of its modules
`<!-- members of jaxrl.core.precision -->`
    the reference of a module's public names
"""

import ast
import functools
import importlib
import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from extension import docstrings


def expand(page: str) -> str:
    """Replaces the markers of a page by Sphinx's directives."""
    page = re.sub(r"<!-- names of (\S+) -->", lambda m: _names(m[1]), page)
    page = re.sub(r"<!-- exported by (\S+) from (\S+) -->", lambda m: _exported(*m.groups()), page)
    return re.sub(r"<!-- members of (\S+) -->", lambda m: _members(m[1]), page)


@functools.cache
def homes(package: str) -> dict[str, list[str]]:
    """Returns the names that a package imports, by the module that it takes them from."""
    source = inspect.getsource(importlib.import_module(package))
    return {
        node.module: _imported(node.module, [alias.name for alias in node.names])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
    }


def _imported(module: str, names: list[str]) -> list[str]:
    return importlib.import_module(module).__all__ if names == ["*"] else names


def _names(package: str) -> str:
    module = importlib.import_module(package)
    found = {name: home for home, names in homes(package).items() for name in names}
    rows = ["| name | |", "| --- | --- |"]
    for name in sorted(found):
        value = getattr(module, name)
        if not inspect.ismodule(value):
            text = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
            rows.append(f"| {{py:obj}}`{package}.{name} <{found[name]}.{name}>` | {text} |")
    return "\n".join(rows)


def _exported(package: str, home: str) -> str:
    module = importlib.import_module(package)
    lines = [f".. py:currentmodule:: {package}", ""]
    lines += [_directive(getattr(module, name), name=name) for name in homes(package)[home]]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _directive(value: Any, *, name: str) -> str:
    if inspect.isclass(value):
        return f".. autoclass:: {name}"
    if inspect.isfunction(value):
        return f".. autofunction:: {name}"
    return f".. autodata:: {name}\n   :no-value:"


def _members(module: str) -> str:
    return f"```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```"


def skip_field(
    app: Sphinx, kind: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Skips the fields of named tuples, which `Attributes:` describes, and flax's `replace`."""
    return True if type(value).__name__ == "_tuplegetter" or name == "replace" else None


def write_docstring(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Turns a docstring into reStructuredText. That of an exported constant stands below it in the
    module that it comes from."""
    package, _, short = name.rpartition(".")
    if kind == "data":
        for home, names in homes(package).items():
            if short in names:
                lines[:] = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", short), lines)
    lines[:] = docstrings.to_rst(lines, kind=kind)


def hide_signature(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, None] | None:
    """Hides the constructor of a protocol, which nobody calls."""
    return ("", None) if getattr(value, "_is_protocol", False) else None
