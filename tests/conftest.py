"""Eight CPU devices, warnings are errors, rank promotion raises."""

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.commands.compile_cache import processor
from tests.processes import with_eight_devices

os.environ["XLA_FLAGS"] = with_eight_devices(os.environ.get("XLA_FLAGS", ""))
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's CPU forgets the order of collectives in programs from the compile cache
# (docs/internals/xla.md). With a thread for each that may wait, devices do not wait for each other
# for ever.
os.environ["PJRT_NPROC"] = "64"
os.environ["HF_HUB_OFFLINE"] = "1"
# Servers that a test starts make a key for their user, which must not be that of the machine's.
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent.parent / ".cache" / "config")
# Threads of torch and vLLM wait for each other by spinning. The workers have no core for more than
# one each: with one, a tiny model generates ten times faster.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
# A server without a process for its worker starts in three quarters of the time: each process
# imports vLLM anew. The server of test_server.py is as users have it.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Programs without the lines of the source that each operation comes from are built faster.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Without a cache, half of the time is compilation. Compiled programs are kept in the checkout: for
# resumed runs, the other worker, commands that tests start, and the next run of the tests.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = Path(__file__).parent.parent / ".cache" / "compiled" / processor()
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax._src import compiler
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_rank_promotion", "raise")
# JAX makes an MLIR context for each program. One for all saves 3 ms each, and half of the memory.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# A shared machine is slow at times, and a test must not pass or fail by chance.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("jaxrl", derandomize=True, **_PATIENT)
settings.load_profile("jaxrl")


# Begun first, the longest first, so that all workers end at about the same time.
LONGEST = (
    "test_exact.py",
    "test_sharded.py",
    "test_compilers.py",
    "test_examples.py",
    "test_vllm_server.py",
    "test_alarm_actions.py",
    "test_server.py",
    "test_servers.py",
    "test_hosts.py",
    "test_engine.py",
    "test_compile_cache.py",
    "test_vllm_store.py",
    "test_resume.py",
    "test_reproductions.py",
    "test_site.py",
    "test_release.py",
    "test_damaged_runs.py",
    "test_train.py",
    "test_stream.py",
)

# Seconds of a test that waits for others' processes: five workers beside other programs on two
# cores needed 507 for the slowest.
PATIENCE = 900

# Files whose tests need a server, a second process or a whole run; --fast leaves them out.
WHOLE = {
    "test_agents.py",
    "test_alarm_actions.py",
    "test_apart.py",
    "test_certified_run.py",
    "test_checkpoints.py",
    "test_cli.py",
    "test_client.py",
    "test_compile_cache.py",
    "test_compilers.py",
    "test_damaged_runs.py",
    "test_dead_link.py",
    "test_distillation.py",
    "test_doctor.py",
    "test_engine.py",
    "test_examples.py",
    "test_faces.py",
    "test_fleet.py",
    "test_forgeries.py",
    "test_fork.py",
    "test_hosts.py",
    "test_inputs.py",
    "test_int8_engine.py",
    "test_install_torch.py",
    "test_judge.py",
    "test_launch.py",
    "test_lora_runs.py",
    "test_mirror.py",
    "test_packaging.py",
    "test_pairs.py",
    "test_pass_rates.py",
    "test_precision_rollback.py",
    "test_processes.py",
    "test_publishers.py",
    "test_python_tests.py",
    "test_release.py",
    "test_reproductions.py",
    "test_restart.py",
    "test_resume.py",
    "test_reward_model.py",
    "test_routing_replay.py",
    "test_sandbox.py",
    "test_scores.py",
    "test_served_fleet.py",
    "test_served_reward_model.py",
    "test_server.py",
    "test_servers.py",
    "test_service_gateway.py",
    "test_sft.py",
    "test_site.py",
    "test_sleeping_server.py",
    "test_stock_server.py",
    "test_stream.py",
    "test_train.py",
    "test_transports.py",
    "test_vllm_commands.py",
    "test_vllm_server.py",
    "test_vllm_store.py",
    "test_workers.py",
}


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """Compiles with LLVM's optimisations, for runs whose steps take longer than their programs."""
    make_options = compiler.get_compile_options

    def with_level(*args: Any, env_options_overrides: Any = None, **kwargs: Any) -> Any:
        given = {"xla_backend_optimization_level": 1} | (env_options_overrides or {})
        return make_options(*args, env_options_overrides=given, **kwargs)

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", with_level)
        yield
    jax.clear_caches()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keeps the workers from importing files whose tests -m leaves out."""
    if not collection_path.name.startswith("test_"):
        return None
    left_out = {"whole": False, "not whole": True}.get(config.getoption("markexpr"))
    return left_out == (collection_path.name in WHOLE) or None


def pytest_collection_finish() -> None:
    """Lets the garbage collector run seldom, and not over the imported modules.

    Tracing allocates fast what reference counts free; a tenth of the time went into the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends a worker whose reports are sent; freeing all that it holds would take seconds."""
    if hasattr(config, "workerinput"):
        os._exit(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        if item.path.name in WHOLE:
            item.add_marker(pytest.mark.whole)
            item.add_marker(pytest.mark.timeout(PATIENCE))
