"""The public names: those that a face lists, and those of the modules that it lists as a whole."""

import ast
import functools
import itertools
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = sorted(f"jaxrl.{stub.parent.name}" for stub in ROOT.glob("jaxrl/*/__init__.pyi"))
FACES = ["jaxrl", *ROOMS]


def source(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def stub(face: str) -> Path:
    return ROOT / face.replace(".", "/") / "__init__.pyi"


@functools.cache
def listed(face: str) -> dict[str, str]:
    """The names that a face lists, with their modules. A module that is listed is its own."""
    found: dict[str, str] = {}
    for node in ast.parse(stub(face).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, f"{face}: {alias.name} as {alias.asname}"
                assert alias.name not in found, f"{face} lists {alias.name} twice"
                found[alias.name] = f"{face}.{node.module or alias.name}"
    return found


def docstrings(module: str) -> dict[str, str | None]:
    """The docstrings of the names that a module defines. Those of constants stand below them."""
    found: dict[str, str | None] = {}
    body = ast.parse(source(module).read_text()).body
    for node, below in itertools.pairwise([*body, ast.Pass()]):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                found[name] = ast.get_docstring(node)
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                text = below.value if isinstance(below, ast.Expr) else None
                found[name] = str(text.value) if isinstance(text, ast.Constant) else None
    return found


@functools.cache
def public() -> dict[str, str | None]:
    """The public names such as `jaxrl.core.Rollout`, each once, with their docstrings."""
    found: dict[str, str | None] = {}
    for face in FACES:
        for name, home in listed(face).items():
            if home in ROOMS:  # the name is the room's, or the room
                continue
            if home != f"{face}.{name}":
                found[f"{face}.{name}"] = docstrings(_origin(home, name))[name]
            else:
                own = docstrings(home) if source(home).exists() else _of_package(home)
                kept = [n for n in own if n[0] != "_" and listed(face).get(n) != home]
                found |= {f"{home}.{n}": own[n] for n in kept}
    return found


def _of_package(package: str) -> dict[str, str | None]:
    return {name: docstrings(home)[name] for name, home in listed(package).items()}


def _origin(home: str, name: str) -> str:
    return _origin(listed(home)[name], name) if stub(home).exists() else home
