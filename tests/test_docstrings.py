"""Docstrings: their examples run and print what they show, and their first words say it at once.

The examples run here and not by `testpaths`, so that the settings of tests/conftest.py hold for
them and files that need torch or vLLM are not imported. `pytest --doctest-modules FILE` runs those
of one file.
"""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

from jaxrl import advantages, losses
from jaxrl.advantages import estimators

ROOT = Path(__file__).parent.parent
MODULES = [
    str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for path in sorted((ROOT / "jaxrl").rglob("*.py"))
    if ">>> " in path.read_text()
]
FUNCTIONS = {
    f"{module.__name__}.{name}": function
    for module in (losses, advantages, estimators)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_show(name, capsys):
    module = importlib.import_module(name)
    found = doctest.testmod(
        module,
        extraglobs={public: getattr(module, public) for public in getattr(module, "__all__", ())},
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert found.attempted
    assert not found.failed, capsys.readouterr().out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_algebra_functions_have_examples(name):
    assert ">>> " in (inspect.getdoc(FUNCTIONS[name]) or "")


def first_words(path: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    return [text.split()[0] for node in nodes if (text := ast.get_docstring(node))]


def test_no_docstring_opens_with_a_question_word():
    questions = {"Who", "What", "Where", "Whether", "How", "Which", "When", "If", "Why"}
    sources = [p for part in ("jaxrl", "sharding", "scripts") for p in (ROOT / part).rglob("*.py")]
    found = {word for path in sources for word in first_words(path)}
    assert not questions & found
