"""Runs episodes of `verifiers` in a Python that has it; imports no jaxrl.

    python -P in_verifiers.py ENV.toml    # -P: the module verifiers is not the one beside this

A line of standard input or output is a JSON object that names its episode. In: a `task` begins the
episode, whose programs request turns of `model` at `url`, jaxrl's gateway; `end` abandons it. Out:
a `reward` or an `error` ends the episode.
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


async def play(env: Any, task: Any, *, episode: str, url: str, model: str) -> None:
    """Plays an episode and writes its reward, the mean over the traces of trainable agents."""
    v1 = importlib.import_module("verifiers.v1")
    runner = importlib.import_module("verifiers.v1.env")
    context = v1.ModelContext(model=model, client=v1.EvalClientConfig(base_url=url))
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
    env = load_environment(file)
    tasks, running = Tasks(env.taskset), dict[str, asyncio.Task[None]]()
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def episode(name: str, index: int, *, url: str, model: str) -> None:
        try:
            await play(env, tasks[index], episode=name, url=url, model=model)
        except Exception as error:
            tell(name, error=repr(error))
        finally:
            running.pop(name, None)

    async with env.serving():
        tell("", ready=True)
        while line := await reader.readline():
            message = json.loads(line)
            name = message["episode"]
            if "task" in message:
                given = {key: message[key] for key in ("url", "model")}
                running[name] = asyncio.create_task(episode(name, message["task"], **given))
            elif name in running:
                running[name].cancel()
        for task in running.values():
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
