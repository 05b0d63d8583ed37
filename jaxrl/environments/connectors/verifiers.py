"""The process in which `verifiers` runs, with its own Python; see `in_verifiers`."""

import functools
import itertools
import json
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.data.prompts import Example
from jaxrl.environments.gateway.session import Session

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
        self._lock, self._sessions = threading.Lock(), dict[str, Session]()
        self._numbers, self._ready = itertools.count(), queue.SimpleQueue[bool]()
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()
        if not self._ready.get():
            self.close()
            raise ValueError(
                f"environment.config = {config!r}: {python} cannot run it with verifiers; its "
                "message is above"
            )

    def begin(self, session: Session, example: Example) -> Callable[[], None]:
        """Begins the episode of the task in the column `task`, and returns the function that ends
        it; raises ValueError if the data has no such column."""
        index = example.row.get("task")
        if not isinstance(index, int):
            raise ValueError(f"the column task is {index!r}; expected the index of a task")
        name, endpoint = f"episode-{next(self._numbers)}", session.endpoint
        self._sessions[name] = session
        self._tell(name, task=index, url=endpoint.openai_url, model=endpoint.model)
        return functools.partial(self._end, name)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def _end(self, name: str) -> None:
        if self._sessions.pop(name, None) is not None:
            self._tell(name, end=True)

    def _tell(self, name: str, **content: Any) -> None:
        with self._lock:
            line = json.dumps({"episode": name} | content)
            print(line, file=self._process.stdin, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                told = json.loads(line)
                if "ready" in told:
                    self._ready.put(True)
                elif (session := self._sessions.get(told["episode"])) is not None:
                    error = told.get("error")
                    if error is None:
                        session.add(told["reward"], told["metrics"])
                    session.end("" if error is None else f"verifiers: {error}")
        self._ready.put(False)
        for session in list(self._sessions.values()):
            session.end("the process that runs the environment has ended")
