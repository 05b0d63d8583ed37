"""The sdist and the wheel hold the package alone, and work where nothing else is installed."""

import math
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests import arithmetic
from tests.documented import snippets
from tests.locks import PROJECT, ROOT, pins

NAME = f"jaxrl-{PROJECT['version']}"
# Imports every public name and every command.
IMPORTS = """
import importlib, pathlib, sys
import jaxrl
from jaxrl import commands

root = pathlib.Path(jaxrl.__file__).parent
assert root.is_relative_to(sys.prefix), root
for stub in root.rglob("__init__.pyi"):
    face = importlib.import_module(".".join(stub.parent.relative_to(root.parent).parts))
    print(face.__name__, *(name for name in dir(face) if getattr(face, name) is not None))
for name in commands.COMMANDS:
    commands.load_command(name)
assert "torch" not in sys.modules
"""


def copy(names: list[str], directory: Path) -> Path:
    """Copies files and folders of the checkout, and no link's target."""
    for name in names:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir() and not (ROOT / name).is_symlink():
            shutil.copytree(ROOT / name, target, symlinks=True)
        else:
            shutil.copy(ROOT / name, target, follow_symlinks=False)
    return directory


def build(source: Path, *options: str) -> Path:
    """Builds with the installed setuptools, in the copied files."""
    out = source.parent / f"{source.name}-built"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source]
    subprocess.run(command, check=True, capture_output=True)
    return out


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the checkout, with those not yet added, less those deleted."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in out.split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def package(tracked) -> dict[str, bytes]:
    """What an install holds: the files of jaxrl/, with sharding/ in it."""
    named = {f"jaxrl/{name}" if name.startswith("sharding/") else name: name for name in tracked}
    return {
        name: (ROOT / source).read_bytes()
        for name, source in named.items()
        if name.startswith("jaxrl/") and name != "jaxrl/sharding"
    }


@pytest.fixture(scope="module")
def release(tracked, tmp_path_factory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    return build(copy(tracked, tmp_path_factory.mktemp("release") / "checkout"))


def test_the_wheel_holds_the_package_alone(release, package):
    held = contents(release / f"{NAME}-py3-none-any.whl")
    assert {name: data for name, data in held.items() if ".dist-info/" not in name} == package
    assert {"jaxrl/py.typed", "jaxrl/__init__.pyi", "jaxrl/sharding/mesh.py"} <= held.keys()
    assert f"{NAME}.dist-info/licenses/LICENSE" in held


def test_sdist_holds_package_and_build_files(release, package):
    with tarfile.open(release / f"{NAME}.tar.gz") as archive:
        held = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    about = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name for name in held if not name.startswith("jaxrl.egg-info/")} == {*package, *about}


@pytest.mark.parametrize("source", ["checkout", "image"])
def test_every_source_makes_the_same_wheel(release, tracked, tmp_path, source):
    names = tracked
    if source == "image":  # what scripts/cluster/Dockerfile copies
        lines = (ROOT / "scripts/cluster/Dockerfile").read_text().splitlines()
        names = [n for line in lines if line.startswith("COPY ") for n in line.split()[1:-1]]
    wheel = f"{NAME}-py3-none-any.whl"
    built = build(copy(names, tmp_path / source), "--wheel")
    assert contents(built / wheel) == contents(release / wheel)


def test_an_index_accepts_the_description(release):
    command = [sys.executable, "-m", "twine", "check", "--strict", *release.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout


@pytest.fixture(scope="module")
def installed(release, tmp_path_factory) -> Path:
    """An environment with the wheel and the packages of requirements.txt: links to those of this
    one, so that nothing is fetched."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in pins("requirements.txt", platform.python_version()):
        files = metadata.files(name) or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():  # a namespace of several packages
                (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    wheel = release / f"{NAME}-py3-none-any.whl"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    subprocess.run([*pip, "check"], check=True)
    return environment / "bin"


def test_the_installed_package_works(installed, package, tmp_path, monkeypatch):
    """Imports all of it and runs the README's program, on a model of the quickstart's kind."""
    arithmetic.write(tmp_path)
    (tmp_path / "runs/quickstart/sft").mkdir(parents=True)
    (tmp_path / "untrained").rename(tmp_path / "runs/quickstart/sft/model")
    texts = [s.text for s in snippets("python") if s.where.startswith("README.md:")]
    (program,) = (text for text in texts if "jaxrl.make_learner(" in text)
    shown = "print(jaxrl.to_floats(metrics)['loss'])"
    (tmp_path / "smoke.py").write_text(f"{IMPORTS}\n{program}\n{shown}\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)

    def lines(*command: str) -> list[str]:
        command = (str(installed / command[0]), *command[1:])
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.splitlines()

    *faces, loss = lines("python", "smoke.py")
    assert len(faces) == sum(name.endswith("__init__.pyi") for name in package)
    assert all(len(face.split()) > 1 for face in faces)
    assert math.isfinite(float(loss))
    assert lines("jaxrl", "--version") == [f"jaxrl {PROJECT['version']}"]
