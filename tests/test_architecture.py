"""The shape of the tree: who may import whom, how long a file may be, what may lie where."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A unit is a module or a package of jaxrl, or sharding; it may import its own and lower layers.
# What is not named here is a program's part: config, loop, sft, evaluate, tracking, ...
LOWER = (
    {"sharding", "precision", "metrics", "plugins", "hosts"},
    {"batch", "advantages", "losses", "models"},
    {
        "learner",
        "critic",
        "actor_critic",
        "update",
        "optimizers",
        "checkpoint",
        "sampling",
        "bridge",
        "environments",
        "diagnostics",
        "data",
    },
)
PROGRAM, FRONT = len(LOWER), {"cli", "commands"}

# Within one layer these stay apart as well.
STRANGERS = {
    ("losses", "models"),
    ("models", "losses"),
    ("bridge", "learner"),
    ("bridge", "sampling"),
    ("sampling", "learner"),
}

# Optional or heavy packages, and the only files that may import them.
GUARDED = {
    "aiohttp", "http", "httpx", "httpx2", "huggingface_hub", "requests", "safetensors", "torch",
    "transformers", "urllib", "vllm",
}  # fmt: skip
GATES = {
    "jaxrl/models/huggingface.py",
    "jaxrl/models/peft.py",
    "jaxrl/sampling/routing.py",
    "jaxrl/bridge/vllm_plugin.py",
    "jaxrl/bridge/vllm_engine.py",
    "jaxrl/bridge/vllm_server.py",
}

TOP_LEVEL = re.compile(
    r"README\.md|CHANGELOG\.md|CONTRIBUTING\.md|LICENSE|pyproject\.toml|requirements[a-z-]*\.txt"
    r"|jaxrl|sharding|tests|configs|scripts|docs|\..+"
)
LEFT_OVERS = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error"]))
MAX_LINES = 400


def tracked() -> list[str]:
    """Files of the repository that git knows and the working tree has."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).exists()]


def sources() -> list[str]:
    """The Python files of the two packages, as paths from the root."""
    found = (path for package in ("jaxrl", "sharding") for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def module_name(path: str) -> str:
    """jaxrl/losses/algebra.py -> jaxrl.losses.algebra; a package's __init__ is the package."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


MODULES = {module_name(path): path for path in sources()}


def imports(path: str) -> Iterator[str]:
    """Full names that a file imports, at any depth: `from a import b` gives a.b and, where b is
    not a module, a."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def unit(module: str) -> str:
    """The name by which LOWER knows a module: jaxrl.losses.algebra -> losses."""
    parts = module.split(".")
    return parts[0] if parts[0] == "sharding" or len(parts) == 1 else parts[1]


def layer(unit: str) -> int:
    """0 is the lowest."""
    if unit in FRONT:
        return PROGRAM + 1
    return next((i for i, units in enumerate(LOWER) if unit in units), PROGRAM)


@pytest.mark.parametrize("path", sources())
def test_imports_point_to_lower_layers(path: str) -> None:
    here = unit(module_name(path))
    if here == "jaxrl":
        assert not list(imports(path)), (
            "jaxrl/__init__.py imports nothing: the vLLM plugin needs it"
        )
        return
    for name in imports(path):
        if name.split(".")[0] not in ("jaxrl", "sharding") or unit(name) == here:
            continue
        there = unit(name)
        assert layer(there) <= layer(here), (
            f"{path} (layer {layer(here)}) imports {name} (layer {layer(there)})"
        )
        assert (here, there) not in STRANGERS, f"{path} imports {name}: {here} never does"


def test_no_import_cycle() -> None:
    graph = {m: {n for n in imports(p) if n in MODULES and n != m} for m, p in MODULES.items()}
    while graph:
        free = {m for m, needs in graph.items() if not needs & graph.keys()}
        assert free, f"these modules import each other in a circle: {sorted(graph)}"
        graph = {m: needs for m, needs in graph.items() if m not in free}


@pytest.mark.parametrize("path", [p for p in sources() if p not in GATES])
def test_optional_packages_stay_behind_their_gates(path: str) -> None:
    found = GUARDED & {name.split(".")[0] for name in imports(path)}
    assert not found, f"{path} imports {sorted(found)}; only {sorted(GATES)} may"


@pytest.mark.parametrize("path", [p for p in sources() if p.startswith("sharding/")])
def test_sharding_knows_only_jax(path: str) -> None:
    allowed = {"jax", "sharding"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name in imports(path)} <= allowed


@pytest.mark.parametrize("path", [p for p in tracked() if p.endswith((".py", ".sh", ".toml"))])
def test_files_are_small_and_finished(path: str) -> None:
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"{path}: more than {MAX_LINES} lines"
    assert not LEFT_OVERS.search(text), f"{path}: {LEFT_OVERS.search(text)}"


def test_top_level_holds_only_what_the_design_names() -> None:
    odd = {name.split("/")[0] for name in tracked() if not TOP_LEVEL.fullmatch(name.split("/")[0])}
    assert not odd


def test_the_layout_shows_every_file():
    page = (ROOT / "docs/layout.md").read_text()
    (tree,) = re.findall(r"```text\n(jaxrl/\n.*?)```", page, re.DOTALL)
    shown = sorted(line.split()[0] for line in tree.splitlines() if ".py" in line.split()[0])
    files = [path for path in sources() if not path.endswith("__init__.py")]
    assert shown == sorted(Path(path).name for path in files)
