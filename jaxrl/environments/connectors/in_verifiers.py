"""Runs episodes of `verifiers` in a Python that has it; imports no jaxrl.

    python -P in_verifiers.py ENV.toml    # -P: the module verifiers is not the one beside this

A line of standard input or output is a JSON object that names its episode. In: a `task` begins the
episode, a `turn` is the policy's, `end` abandons the episode. Out: `messages` ask for a turn, a
`reward` or an `error` ends the episode. Programs of verifiers ask for turns at an HTTP endpoint of
this process, which imitates OpenAI's; the model's name is the episode's.
"""

import asyncio
import functools
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from typing import Any, TextIO


@functools.cache
def own_output() -> TextIO:
    """Takes standard output for the protocol; libraries then print to standard error."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return output


def tell(episode: str, **content: Any) -> None:
    """Writes a line."""
    own_output().write(json.dumps({"episode": episode} | content) + "\n")


class Turns:
    """The HTTP endpoint: requests of episodes that wait for the policy's turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def answer(self, episode: str, turn: dict[str, Any]) -> None:
        """Answers the request of an episode, if there is one."""
        if (waiting := self._waiting.pop(episode, None)) is not None and not waiting.done():
            waiting.set_result(turn)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles the requests of a connection."""
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                lines = [line.partition(":") for line in head.lower().split("\r\n")]
                size = next(int(value) for name, _, value in lines if name == "content-length")
                body = json.loads(await reader.readexactly(size))
                status, kind, content = await self._complete(body)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(content)}\r\n\r\n".encode()
                    + content
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, StopIteration):
            pass  # the program has ended
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any]) -> tuple[str, str, bytes]:
        episode = body["model"]
        if episode in self._waiting:
            refusal = f"{episode} asks for two turns at once; an episode is one sequence of tokens"
            tell(episode, error=refusal)
            return "400 Bad Request", "application/json", json.dumps({"error": refusal}).encode()
        future = asyncio.get_running_loop().create_future()
        self._waiting[episode] = future
        tell(episode, messages=body["messages"], tools=body.get("tools") or [])
        message: dict[str, Any] = {"role": "assistant", **await future}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        shared = {"id": "jaxrl", "created": 0, "model": episode}
        choice = {"index": 0, "finish_reason": reason}
        if not body.get("stream"):
            whole = {"object": "chat.completion", "choices": [choice | {"message": message}]}
            content = json.dumps(shared | whole | {"usage": usage}).encode()
            return "200 OK", "application/json", content
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
        delta = message | ({"tool_calls": calls} if calls else {})
        shared["object"] = "chat.completion.chunk"
        events = [{"choices": [choice | {"delta": delta}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(shared | event)}\n\n" for event in events)
        return "200 OK", "text/event-stream", f"{text}data: [DONE]\n\n".encode()


def load_environment(file: str) -> Any:
    """Loads the environment that a TOML file describes, in the form of verifiers' `env` table."""
    v1 = importlib.import_module("verifiers.v1")
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    generic = importlib.import_module("verifiers.v1.utils.generic")
    with open(file, "rb") as content:
        table = tomllib.load(content)
    kind = loaders.environment_class(table.get("taskset", {}).get("id", ""), table.get("id", ""))
    config = generic.concrete_type(kind, v1.EnvConfig, origin=v1.Env) or v1.EnvConfig
    return loaders.load_environment(config.model_validate(table))


class Tasks:
    """The tasks of a taskset by index, loaded on demand."""

    def __init__(self, taskset: Any) -> None:
        self._rest: Iterator[Any] = iter(taskset)
        self._loaded: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        while len(self._loaded) <= index:
            try:
                self._loaded.append(next(self._rest))
            except StopIteration:
                raise IndexError(
                    f"task {index} is not in the taskset; it has {len(self._loaded)}"
                ) from None
        return self._loaded[index]


async def play(env: Any, task: Any, *, episode: str, url: str) -> None:
    """Plays an episode and writes its reward, the mean over the traces of trainable agents."""
    v1 = importlib.import_module("verifiers.v1")
    runner = importlib.import_module("verifiers.v1.env")
    context = v1.ModelContext(model=episode, client=v1.EvalClientConfig(base_url=url))
    played = await env.run_slot(runner.RunSlot(task), context)
    if not played.ok:
        errors = [*played.errors, *(e for trace in played.traces for e in trace.errors)]
        tell(episode, error="; ".join(f"{e.type}: {e.message}" for e in errors) or "not ok")
        return
    traces = [trace for trace in played.traces if trace.agent.trainable]
    metrics: dict[str, float] = {}
    for trace in traces:
        parts = {name: part.score for name, part in trace.rewards.items() if part is not None}
        known = {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= parts | known
    reward = sum(trace.reward for trace in traces) / len(traces)
    tell(episode, reward=reward, metrics=metrics)


async def main(file: str) -> None:
    """Serves episodes until standard input ends."""
    own_output()
    env, turns = load_environment(file), Turns()
    tasks, running = Tasks(env.taskset), dict[str, asyncio.Task[None]]()
    server = await asyncio.start_server(turns.serve, "127.0.0.1", 0, limit=1 << 26)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def episode(name: str, index: int) -> None:
        try:
            await play(env, tasks[index], episode=name, url=url)
        except Exception as error:
            tell(name, error=repr(error))
        finally:
            running.pop(name, None)
            turns.answer(name, {"content": ""})  # releases a request that is still open

    async with env.serving():
        tell("", ready=True)
        while line := await reader.readline():
            message = json.loads(line)
            name = message["episode"]
            if "task" in message:
                running[name] = asyncio.create_task(episode(name, message["task"]))
            elif "turn" in message:
                turns.answer(name, message["turn"])
            elif name in running:
                running[name].cancel()
        for task in running.values():
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
