"""How tests compile, and Python in processes of their own."""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Most of the time goes into compiling. Without LLVM's optimisations, by the old emitters and in one
# piece it takes a sixth, and the program that is compiled stays the same. The emitters are chosen
# by an extra option: jaxlib 0.11 aborts at the flag xla_cpu_use_fusion_emitters.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def with_eight_devices(flags: str) -> str:
    """Adds the tests' flags, unless a worker inherited them: they are part of the cache's keys."""
    more = f"{XLA_FLAGS} --xla_force_host_platform_device_count=8"
    return flags if more in flags else f"{flags} {more}"


# `jaxrl` without torch, which transformers would import: seconds in each process.
JAXRL = (
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None; from jaxrl import cli; sys.exit(cli.main())",
)

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.preloaded"])


class ModuleProcess:
    """`python -m MODULE ARGUMENTS`, with the methods of a `subprocess.Popen`.

    It is forked from a process that has imported jaxrl, which saves two seconds of a core. JAX has
    read its variables there, but no XLA_FLAGS.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], *, output: Path, environment: Mapping[str, str]
    ) -> None:
        given = (module, list(arguments), os.fspath(output), dict(environment))
        self._process = _FORKS.Process(target=_run, args=given)
        with contextlib.chdir(ROOT):  # where the first one finds tests.preloaded
            self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        self._process.kill()


def _run(module: str, arguments: list[str], output: str, environment: dict[str, str]) -> None:
    assert "tests.preloaded" in sys.modules, "it cannot be imported"
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # which the end of a forked process leaves out
        threading._shutdown()
        atexit._run_exitfuncs()
