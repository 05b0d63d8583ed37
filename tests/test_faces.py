"""The faces: what a room lists is what a reader, a type checker and the runtime find."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl.losses import recipes
from tests.documented import FENCE
from tests.faces import FACES, ROOT, listed, public, stub

VLLM = [
    "vllm",
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.distributed.weight_transfer.base",
    "vllm.model_executor.layers.logits_processor",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.model_loader.reload",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.platforms",
]


def run(code: str, *path: Path, cwd: Path) -> None:
    """Runs a script in a folder, with further folders behind it on the path."""
    script = cwd / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("face", FACES)
def test_dir_equals_face(face):
    module = importlib.import_module(face)
    assert set(dir(module)) == set(module.__all__) == set(listed(face))
    for name, home in listed(face).items():
        is_module = inspect.ismodule(getattr(module, name))
        assert is_module == (home == f"{face}.{name}"), f"{face}.{name}"


@pytest.mark.parametrize("face", FACES)
def test_no_submodule_hides_a_name(face):
    submodules = {f"{face}.{path.stem}" for path in stub(face).parent.iterdir()}
    for name, home in listed(face).items():
        assert f"{face}.{name}" not in submodules - {home}


def test_public_names_are_documented():
    assert not [name for name, docstring in public().items() if not docstring]


def test_recipe_lists_are_equal():
    homes = listed("jaxrl.losses").items()
    names = {name for name, home in homes if home == recipes.__name__} - {"recipes"}
    assert names == set(dir(recipes))


def test_faces_are_lazy(tmp_path):
    heavy = {"jax", "flax", "optax", "numpy", "torch", "transformers"}
    imports = f"import sys, {', '.join(FACES)}"
    run(f"{imports}\nassert not {heavy} & set(sys.modules)", ROOT, cwd=tmp_path)


@pytest.mark.parametrize(
    "imports",
    [
        "from jaxrl.bridge import VllmServer",
        "from jaxrl.bridge.in_vllm import plugin, auth, lease, relay, ownership",
        "from jaxrl.bridge.in_vllm import engine",
        "from jaxrl.bridge.store import agent",
    ],
)
def test_vllm_process_imports_no_jax(imports, tmp_path):
    code = f"""
import sys, types
class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {{"__class_getitem__": classmethod(lambda cls, _: cls)}})
sys.modules |= {{name: Module(name) for name in {VLLM}}}
{imports}
assert not {{"jax", "flax", "optax"}} & set(sys.modules)
"""
    run(code, ROOT, cwd=tmp_path)


def test_foreign_sharding_file(tmp_path):
    (tmp_path / "sharding.py").write_text("raise ImportError('foreign')")
    run("import jaxrl; jaxrl.make_learner; jaxrl.sharding.make_mesh", ROOT, cwd=tmp_path)


def test_folder_named_jaxrl(tmp_path):
    (tmp_path / "jaxrl").mkdir()
    run("import jaxrl; jaxrl.Precision.parse('fp32')", ROOT, cwd=tmp_path)


def test_type_checker_sees_types(tmp_path):
    code = """import jaxrl
from typing import assert_type
assert_type(jaxrl.Precision.parse("fp32"), jaxrl.core.Precision)
assert_type(jaxrl.grpo().objective, jaxrl.losses.Objective)
jaxrl.SamplingParams(max_tokens="many")
jaxrl.losses.no_such_loss
"""
    (tmp_path / "mine.py").write_text(code)
    checker = [Path(sys.executable).with_name("pyrefly"), "check", "--preset", "default"]
    places = ["--site-package-path", ROOT, "--python-interpreter-path", sys.executable]
    done = subprocess.run(
        [*checker, *places, "--output-format", "json", "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = {error["line"]: error["name"] for error in json.loads(done.stdout)["errors"]}
    assert found == {5: "bad-argument-type", 6: "missing-attribute"}


def sources() -> Iterator[tuple[str, str]]:
    """The Python of examples/ and of the pages, with its place."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield path.name, path.read_text()
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        for number, cell in enumerate(c for c in cells if c["cell_type"] == "code"):
            yield f"{path.name}[{number}]", "".join(cell["source"])
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, (language, text) in enumerate(FENCE.findall(path.read_text())):
            if language == "pycon":
                text = "\n".join(re.findall(r"^(?:>>>|\.\.\.) ?(.*)", text, flags=re.M))
            if language in ("python", "pycon"):
                yield f"{path.relative_to(ROOT)}[{number}]", text


def used(tree: ast.Module) -> Iterator[str]:
    """The paths below `jaxrl` that a program imports or reads, such as `jaxrl.core.Rollout`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Attribute():
                yield from re.findall(r"^[\w.]+$", ast.unparse(node))


def test_examples_use_public_names():
    for where, text in sources():
        for path in used(ast.parse(text)):
            face, *names = path.split(".")
            while face in FACES and names and names[0] != "*":
                assert names[0] in (*listed(face), "__version__"), f"{where}: {path}"
                face = f"{face}.{names.pop(0)}"
