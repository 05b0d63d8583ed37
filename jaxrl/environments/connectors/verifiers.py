"""The process in which `verifiers` runs, with its own Python; see `in_verifiers`."""

import contextlib
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

_ENDED = "the process that runs the environment has ended"
_SCRIPT = str(Path(__file__).with_name("in_verifiers.py"))


class Host:
    """The process that runs the episodes. It ends with this one, because its input closes then. If
    it dies, its episodes fail, and the next one starts it again."""

    def __init__(self, python: str, config: str) -> None:
        """Starts it and waits until its environment is loaded; raises ValueError if loading fails,
        whose messages are on standard error."""
        for key, file in (("python", python), ("config", config)):
            if not Path(file).is_file():
                raise ValueError(f"environment.{key} = {file!r} does not exist")
        self._start = functools.partial(_Process, python, config)
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._process = self._start()

    def begin(self, session: Session, example: Example) -> Callable[[], None]:
        """Begins the episode of the task in the column `task`, and returns the function that ends
        it; raises ValueError if the data has no such column, or the process cannot start again."""
        index = example.row.get("task")
        if not isinstance(index, int):
            raise ValueError(f"the column task is {index!r}; expected the index of a task")
        with self._lock:
            if self._process.ended.is_set():
                self._process.close()
                self._process = self._start()
            process = self._process
        name = f"episode-{next(self._numbers)}"
        process.begin(name, session, index)
        return functools.partial(process.end, name)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


class _Process:
    """One start of the process, and the episodes in it."""

    def __init__(self, python: str, config: str) -> None:
        pipe = subprocess.PIPE
        command = [python, "-P", _SCRIPT, config]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._lock, self._sessions = threading.Lock(), dict[str, Session]()
        self._ready, self.ended = queue.SimpleQueue[bool](), threading.Event()
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()
        if not self._ready.get():
            self.close()
            raise ValueError(
                f"environment.config = {config!r}: {python} cannot run it with verifiers; its "
                "message is above"
            )

    def begin(self, name: str, session: Session, task: int) -> None:
        endpoint = session.endpoint
        self._sessions[name] = session
        self._tell(name, task=task, url=endpoint.openai_url, model=endpoint.model)
        if self.ended.is_set():
            session.end(_ENDED)

    def end(self, name: str) -> None:
        if self._sessions.pop(name, None) is not None:
            self._tell(name, end=True)

    def close(self) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, name: str, **content: Any) -> None:
        line = json.dumps({"episode": name} | content)
        # `_read` ends the episodes of a process that has ended.
        with self._lock, contextlib.suppress(BrokenPipeError):
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
        self.ended.set()
        for session in list(self._sessions.values()):
            session.end(_ENDED)
