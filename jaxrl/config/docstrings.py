"""Docstrings of the keys of config tables.

Pydantic reads them too, if it is asked to. Before Python 3.13 it then looks for the module of every
frame that is active while a class is made: every command took 0.4 s longer to start.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise


@functools.cache
def attribute_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Maps the classes of an imported module to their attributes' docstrings.

    Returns nothing for a module without a source, such as one typed into a shell.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    classes = (one for one in ast.parse(source).body if isinstance(one, ast.ClassDef))
    return {one.name: dict(_documented(one)) for one in classes}


def _documented(one: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(one.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(found))),
            ):
                yield name, inspect.cleandoc(found)
