"""Process of the agent of this host."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jaxrl.bridge.in_vllm.auth import KEY
from jaxrl.bridge.owned_directory import MEMORY, OwnedDirectory
from jaxrl.bridge.store import agent

_PAUSE = 0.5  # seconds before a restart


class AgentProcess(contextlib.AbstractContextManager["AgentProcess"]):
    """The agent's process, which ends with the `with` block or with this process, even if that is
    killed. If it ends earlier, it is restarted and keeps its versions.

    Attributes:
      directory: the agent's directory, an option of the servers of this host.
    """

    def __init__(self, *, key: str | None, note: Callable[[str], None]) -> None:
        """Starts the agent; web servers get `key`, and `note` shows a line to the user."""
        self._owned = OwnedDirectory(MEMORY)
        self.directory: Path = self._owned.path
        self._key, self._note = key, note
        self._closed = threading.Event()
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def process_id(self) -> int:
        """Id of the agent's process; changes with a restart."""
        return self._process.pid

    def close(self) -> None:
        """Ends the agent and removes its payloads; servers keep the weights they have loaded."""
        self._closed.set()
        while self._watcher.is_alive():  # it may just have restarted the agent
            self._process.kill()
            self._watcher.join(_PAUSE)
        self._owned.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        while True:
            self._process.wait()
            self._process.communicate()  # closes its pipe
            if self._closed.wait(_PAUSE):
                return
            status = self._process.returncode
            self._note(f"the agent that fetches weights ended with status {status}; restarting")
            self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", agent.__name__, str(self.directory)],
            env=os.environ | ({} if self._key is None else {KEY: self._key}),
            stdin=subprocess.PIPE,  # never written: it closes when this process ends
            start_new_session=True,  # apart from Ctrl-C
            pass_fds=[self._owned.lock],
        )
