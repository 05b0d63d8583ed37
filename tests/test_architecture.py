"""Rules that import contracts cannot state: small files, nothing unfinished, a known top level."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import LONGEST, WHOLE

ROOT = Path(__file__).parent.parent
TOP_LEVEL = re.compile(
    r"README\.md|CHANGELOG\.md|CONTRIBUTING\.md|LICENSE|MANIFEST\.in|pyproject\.toml|requirements[a-z-]*\.txt"
    r"|jaxrl|sharding|tests|configs|scripts|docs|examples|\..+"
)
LEFT_OVERS = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error"]))
MAX_LINES = 400


def tracked() -> list[str]:
    """Files of the repository that git knows and the working tree has."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).exists()]


def test_files_are_small_and_finished() -> None:
    for path in (p for p in tracked() if p.endswith((".py", ".sh", ".toml"))):
        text = (ROOT / path).read_text()
        assert len(text.splitlines()) <= MAX_LINES, f"{path}: more than {MAX_LINES} lines"
        assert not LEFT_OVERS.search(text), f"{path}: {LEFT_OVERS.search(text)}"


def test_top_level_follows_the_design() -> None:
    odd = {name.split("/")[0] for name in tracked() if not TOP_LEVEL.fullmatch(name.split("/")[0])}
    assert not odd


def test_files_of_whole_tests_are_listed() -> None:
    """One that marks itself instead is run neither with `-m whole`, which leaves out files that
    tests/conftest.py does not list, nor with `-m "not whole"`."""
    there = [*(ROOT / "tests").rglob("test_*.py")]
    assert {*WHOLE, *LONGEST} <= {path.name for path in there}
    assert not [path for path in there if "pytest.mark." + "whole" in path.read_text()]


def test_importing_starts_no_backend() -> None:
    """Else the processes of several hosts could not join."""
    rooms = [f"jaxrl.{name}" for name in ("train", "learner.policy", "sampling.embedded.sampler")]
    code = f"import jaxrl, {', '.join(rooms)}; from jax._src.xla_bridge import _backends as found"
    subprocess.run([sys.executable, "-c", f"{code}; assert not found"], cwd=ROOT, check=True)
