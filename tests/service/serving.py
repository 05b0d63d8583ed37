"""A `jaxrl tinker` process, and the official client's objects for it."""

import gc
import os
import re
import time
import warnings
from pathlib import Path

import tinker

from jaxrl.bridge import free_port
from tests.processes import ModuleProcess

# Deprecations inside the client, and connections that it leaves open.
QUIET = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
KEYS = ("tml-first", "tml-second")


class Server:
    """A server that can be killed and started again on the same port and state. Its processes have
    `devices` together."""

    def __init__(
        self, model: Path, directory: Path, *options: str, devices: int = 1, processes: int = 1
    ) -> None:
        self.model, self.directory, self._options = model, directory, options
        self.directory.mkdir(parents=True, exist_ok=True)
        self._flags, self._count = _devices(devices // processes), processes
        self._port, self._starts = 0, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._starts += 1
        environment = {**os.environ, "TINKER_API_KEY": ",".join(KEYS), "XLA_FLAGS": self._flags}
        arguments = ["tinker", str(self.model), "--port", str(self._port), "--name", "tiny"]
        arguments += ["--state_dir", str(self.directory / "state"), *self._options]
        if self._count > 1:
            address = f"127.0.0.1:{free_port('127.0.0.1', 0)}"
            arguments += ["--hosts.coordinator", address, "--hosts.processes", str(self._count)]
        log, *others = (self._log(i) for i in range(self._count))
        self.others = [
            ModuleProcess(
                "jaxrl",
                [*arguments, "--hosts.process", str(i)],
                output=other,
                environment=environment,
            )
            for i, other in enumerate(others, 1)
        ]
        arguments += ["--hosts.process", "0"] if others else []
        self.process = ModuleProcess("jaxrl", arguments, output=log, environment=environment)
        while not (found := re.search(r":(\d+)\nexport", _text(log))):
            assert self.process.poll() is None, _text(log)
            time.sleep(0.1)
        self._port = int(found[1])

    def stop(self) -> None:
        self.process.send_signal(15)
        for process in (self.process, *self.others):
            process.wait()
        # The client leaves connections open, which a later test must not be told of.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def kill(self) -> None:
        for process in (self.process, *self.others):
            process.kill()
            process.wait()

    def log(self, process: int = 0) -> str:
        return _text(self._log(process))

    def _log(self, process: int) -> Path:
        return self.directory / f"log-{self._starts}-{process}"

    def client(self, key: str = KEYS[0]) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=key)


def _devices(count: int) -> str:
    name = "--xla_force_host_platform_device_count"
    return re.sub(rf"{name}=\d+", f"{name}={count}", os.environ["XLA_FLAGS"])


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
