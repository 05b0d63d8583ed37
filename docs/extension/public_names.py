"""The reference of the library's public names, made from its faces.

A face is a package whose `__init__.pyi` lists its names and the module of each. A page of
docs/reference holds markers, which Sphinx's directives for the names replace:

`<!-- names of jaxrl.losses from ratios -->`
    the names that the face lists from `jaxrl/losses/ratios.py`; several modules are separated by
    spaces
`<!-- names of jaxrl.losses.preference -->`
    the names of a module, or of a package with a list of its own, that a face lists as a whole
"""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from extension import docstrings

ROOT = Path(__file__).parents[2]
MARKER = re.compile(r"<!-- names of (\S+)(?: from ([\w. ]+))? -->")


@functools.cache
def homes(face: str) -> dict[str, str]:
    """Maps each name of a face to its module. A module that the face lists as a whole maps to the
    face itself."""
    return {
        alias.name: f"{face}.{node.module}" if node.module else face
        for node in ast.parse(_path(face, "/__init__.pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def members(module: str) -> list[str]:
    """Returns the public names of a module, except names that its room's face lists itself."""
    if _path(module, "/__init__.pyi").exists():
        return list(homes(module))
    found = list[str]()
    for node in ast.parse(_path(module, ".py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [target.id for target in targets if isinstance(target, ast.Name)]
    listed = homes(module.rpartition(".")[0])
    return [n for n in found if not n.startswith("_") and listed.get(n) != module]


def _path(module: str, ending: str) -> Path:
    return ROOT / (module.replace(".", "/") + ending)


def expand(page: str) -> str:
    """Replaces the markers of a page by Sphinx's directives."""
    return MARKER.sub(lambda m: _reference(m[1], m[2]), page)


def _reference(module: str, parts: str | None) -> str:
    if parts is None:
        names = members(module)
    else:
        wanted = [f"{module}.{part}" for part in parts.split()]
        names = [name for home in wanted for name, of in homes(module).items() if of == home]
    lines = [f".. py:currentmodule:: {module}", ""]
    lines += [_directive(getattr(importlib.import_module(module), name), name) for name in names]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _directive(value: Any, name: str) -> str:
    if inspect.isclass(value) and value.__name__ == name:
        return f".. autoclass:: {name}\n   :members:"
    if inspect.isfunction(inspect.unwrap(value)):
        return f".. autofunction:: {name}"
    return f".. autodata:: {name}\n   :no-value:"


def skip_field(
    app: Sphinx, kind: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Skips the fields of named tuples, which `Attributes:` describes, and flax's `replace`."""
    return True if type(value).__name__ == "_tuplegetter" or name == "replace" else None


def write_docstring(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Turns a docstring into reStructuredText. The docstring of a constant stands below it, in the
    module that its face takes it from."""
    face, _, short = name.rpartition(".")
    if kind == "data":
        home = find_home(app, face, short)
        lines[:] = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", short), lines)
    lines[:] = docstrings.to_rst(lines, kind=kind)


def find_home(app: Sphinx, module: str, name: str) -> str:
    """Returns the module with the source of a name. An alias such as `dict[str, float]` does not
    know it."""
    if _path(module, "/__init__.pyi").exists():
        return homes(module)[name.partition(".")[0]]
    return module


def hide_signature(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, None] | None:
    """Hides the constructor of a protocol, which nobody calls."""
    return ("", None) if getattr(value, "_is_protocol", False) else None
