"""Runs the agent of this host."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxrl.bridge.in_vllm.auth import KEY
from jaxrl.bridge.owned_directory import MEMORY, OwnedDirectory
from jaxrl.bridge.store import agent


class AgentProcess:
    """The agent, which ends with the `with` block or with this process, however it ends.

    Attributes:
      directory: that servers of this host are told.
    """

    def __init__(self, *, key: str | None, note: Callable[[str], None]) -> None:
        """Starts the agent; web servers get `key`, and `note` shows a line to the user."""
        self._owned = OwnedDirectory(MEMORY)
        self.directory: Path = self._owned.path
        self._key, self._note = key, note
        self._process = self._start()

    def check(self) -> None:
        """Starts the agent again if it has ended; its successor has what it had."""
        if (status := self._process.poll()) is not None:
            self._end()
            self._note(f"the agent that fetches weights ended with status {status}; restarting")
            self._process = self._start()

    @property
    def process_id(self) -> int:
        """Id of the agent's process; another after a restart."""
        return self._process.pid

    def close(self) -> None:
        """Ends the agent and removes its payloads; servers keep the weights they have loaded."""
        self._end()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", agent.__name__, str(self.directory)],
            env=os.environ | ({} if self._key is None else {KEY: self._key}),
            stdin=subprocess.PIPE,  # never written: it closes when this process ends
            start_new_session=True,  # apart from Ctrl-C
            pass_fds=[self._owned.lock],
        )
