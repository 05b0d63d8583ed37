"""Agents of the gateway: a command, or a Python function."""

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxrl.data.prompts import Example
from jaxrl.environments.gateway.session import Session
from jaxrl.environments.isolation.calls import run_in_thread
from jaxrl.environments.isolation.places import describe


def run_command(command: Sequence[str], session: Session, example: Example) -> Callable[[], None]:
    """Starts a command for an episode, and returns the function that stops it.

    `{name}` in an argument stands for the row's column of that name. Standard input is the row as
    JSON, and the variables of `Endpoint` are set. A status other than 0 fails the episode. The
    processes that the command starts end with it.
    """
    process = subprocess.Popen(
        [_filled(argument, example) for argument in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **session.endpoint.variables},
        start_new_session=True,  # so that processes which it starts can be ended with it
    )
    row = json.dumps(dict(example), default=str).encode()

    def stop() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def wait() -> None:
        # What it leaves behind would hold its standard error open.
        run_in_thread(process.wait).add_done_callback(lambda _: stop())
        _, errors = process.communicate(row)
        last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        failed = f"{command[0]} ended with status {process.returncode}: {last[:500]}"
        session.end(failed if process.returncode else "")

    run_in_thread(wait)
    return stop


def run_function(
    function: Callable[..., Any], session: Session, example: Example
) -> Callable[[], None]:
    """Calls `function(endpoint, example)`, which may be asynchronous, in a thread of its own. A
    number that it returns is added to the reward; an exception fails the episode."""

    def call() -> None:
        returned = function(session.endpoint, dict(example))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        if returned is not None:
            session.add(float(returned))

    def finished(future: "Future[None]") -> None:
        error = future.exception()
        session.end("" if error is None else describe(error, function=function))

    run_in_thread(call).add_done_callback(finished)
    return lambda: None  # Python cannot end a thread; its next request is refused


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _filled(argument: str, example: Mapping[str, Any]) -> str:
    """Replaces names of columns in one pass: a value that holds one stays as it is."""

    def value(name: re.Match[str]) -> str:
        return str(example[name[1]]) if name[1] in example else name[0]

    return re.sub(r"\{(\w+)\}", value, argument)
