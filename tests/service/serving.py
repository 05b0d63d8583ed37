"""A `jaxrl tinker` process, and the official client's objects for it."""

import gc
import os
import re
import time
import warnings
from pathlib import Path

import tinker

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
    """A server that can be killed and started again on the same port and state."""

    def __init__(self, model: Path, directory: Path, *options: str) -> None:
        self.model, self.directory, self._options = model, directory, options
        self.directory.mkdir(parents=True, exist_ok=True)
        self._port, self._starts = 0, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._starts += 1
        log = self.directory / f"log-{self._starts}"
        environment = {**os.environ, "TINKER_API_KEY": ",".join(KEYS), "XLA_FLAGS": _one_device()}
        arguments = ["tinker", str(self.model), "--port", str(self._port), "--name", "tiny"]
        arguments += ["--state_dir", str(self.directory / "state"), *self._options]
        self.process = ModuleProcess("jaxrl", arguments, output=log, environment=environment)
        while not (found := re.search(r":(\d+)\nexport", _text(log))):
            assert self.process.poll() is None, _text(log)
            time.sleep(0.1)
        self._port = int(found[1])

    def stop(self) -> None:
        self.process.send_signal(15)
        self.process.wait()
        # The client leaves connections open, which a later test must not be told of.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return _text(self.directory / f"log-{self._starts}")

    def client(self, key: str = KEYS[0]) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=key)


def _one_device() -> str:
    return re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
