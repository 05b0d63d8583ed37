"""Eight CPU devices, warnings are errors, rank promotion raises."""

import atexit
import os
import shutil
import tempfile

from tests.processes import XLA_FLAGS

os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), XLA_FLAGS, "--xla_force_host_platform_device_count=8")
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
# What has been compiled once is read: by runs that go on, by the other workers of this run, and by
# commands that tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxrl-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shared machine is slow at times, and a test must not pass or fail by chance.
settings.register_profile("jaxrl", deadline=None, derandomize=True)
settings.load_profile("jaxrl")


# Begun first, so that both workers end at about the same time; files that start many processes are
# not next to each other.
LONGEST = (
    "test_vllm_server.py",
    "test_train.py",
    "test_agents.py",
    "test_alarm_actions.py",
    "test_stream.py",
    "test_resume.py",
    "test_hosts.py",
    "test_engine.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
