"""The process in which `verifiers` runs, with its own Python; see `in_verifiers`."""

import itertools
import json
import queue
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]
_SCRIPT = str(Path(__file__).with_name("in_verifiers.py"))


class Host:
    """The process that runs the episodes. It ends with this one, because its input closes then."""

    def __init__(self, python: str, config: str) -> None:
        """Starts it and waits until its environment is loaded; raises ValueError if loading fails,
        whose messages are on standard error."""
        for key, file in (("python", python), ("config", config)):
            if not Path(file).is_file():
                raise ValueError(f"environment.{key} = {file!r} does not exist")
        pipe = subprocess.PIPE
        command = [python, "-P", _SCRIPT, config]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._lock, self._episodes = threading.Lock(), dict[str, queue.SimpleQueue[Any]]()
        self._numbers = itertools.count()
        ready = self._episodes[""] = queue.SimpleQueue[Any]()
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()
        if "error" in ready.get():
            self.close()
            raise ValueError(
                f"environment.config = {config!r}: {python} cannot run it with verifiers; its "
                "message is above"
            )

    def begin(self) -> str:
        """Begins an episode without a task and returns its name."""
        name = f"episode-{next(self._numbers)}"
        self._episodes[name] = queue.SimpleQueue()
        return name

    def ask(self, name: str, **content: Any) -> dict[str, Any]:
        """Sends an episode its `task`, or a `turn` of the policy; returns the environment's next
        request or the reward, and raises RuntimeError if the episode failed."""
        self._tell(name, **content)
        told = self._episodes[name].get()
        if "error" in told:
            raise RuntimeError(f"verifiers: {told['error']}")
        return told

    def end(self, name: str) -> None:
        """Ends an episode, finished or not."""
        if self._episodes.pop(name, None) is not None:
            self._tell(name, end=True)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, name: str, **content: Any) -> None:
        with self._lock:
            line = json.dumps({"episode": name} | content)
            print(line, file=self._process.stdin, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                told = json.loads(line)
                if (waiting := self._episodes.get(told["episode"])) is not None:
                    waiting.put(told)
        for waiting in list(self._episodes.values()):
            waiting.put({"error": "the process that runs the environment has ended"})
