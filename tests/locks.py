"""The project's table of pyproject.toml, and the versions that the locks hold."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def applies(requirement: Requirement, python: str) -> bool:
    """If a requirement's marker selects it for a version of Python, on this system."""
    version = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    return requirement.marker is None or requirement.marker.evaluate(version)


def pins(lock: str, python: str) -> dict[str, str]:
    """Versions that a lock holds for a version of Python: one of each package."""
    found: dict[str, str] = {}
    for requirement in map(Requirement, (ROOT / lock).read_text().splitlines()):
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{lock}: two versions of {name} for Python {python}"
            (specifier,) = requirement.specifier
            found[name] = specifier.version
    return found
