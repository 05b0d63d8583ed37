"""Groups from a stand-in server, played by workers or by this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.builders.environment import make_episode_runner
from jaxrl.builders.prompts import training_params
from jaxrl.builders.sampler import Connection, Serving
from jaxrl.builders.task import load_task
from jaxrl.fleet.workers import Workers
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import VllmSampler
from jaxrl.training.rollouts.generate import RolloutSource
from jaxrl.training.run import _group_workers
from tests import tiny
from tests.run_config import run_config
from tests.sampling.standin import Server, choice
from tests.training.small_runs import write_rows

CODE = """
import os, pathlib
from jaxrl.environments import Step, batched
HERE = pathlib.Path(__file__).parent
with (HERE / "imported").open("a") as file:
    file.write(f"{os.getpid()}\\n")

def early(completion, example):
    if example["answer"] == "3" and len(completion) % 2:
        raise KeyError(completion)
    return sum(c in "abcdefghijklm" for c in completion) / 7

def fatal(completion, example):
    mark = HERE / "mark"
    if example["answer"] == "5" and not mark.exists():
        mark.touch()
        os._exit(1)
    return len(completion) / 3

@batched
def rank(completions, examples):
    return [sorted(completions).index(text) for text in completions]

class Twice:
    def __init__(self, context):
        self.turns = 0

    async def reset(self, example):
        return example.tokens

    async def step(self, completion):
        self.turns += 1
        return Step([3, 4], reward=len(completion) / 9, done=self.turns == 2)
"""


def write_material(directory: Path) -> None:
    tiny.write_checkpoint(directory / "model")
    rows = [{"prompt": f"{i}+{i}=", "answer": str(i)} for i in range(12)]
    write_rows(directory / "prompts.jsonl", rows)
    (directory / "code.py").write_text(CODE)


def reply(body: dict[str, Any]) -> tuple[int, str]:
    """Answers by prompt, seed and place in the group alone."""
    settings, found = body["sampling_params"], []
    for i in range(settings["n"]):
        random = np.random.default_rng((settings["seed"] + i, *body["token_ids"]))
        count = int(random.integers(1, settings["max_tokens"] + 1))
        tokens = random.integers(2, 60, count).tolist()
        span = [{"version": "0", "start": 0, "end": count}]
        found.append(choice(i, tokens, weight_versions=span))
    return 200, json.dumps({"choices": found})


def open_source(
    directory: Path, server: Server, *, workers: Workers | None, **keys: Any
) -> RolloutSource:
    """A run's source of groups, as `open_run` makes it."""
    served = {"sampler.name": "vllm", "sampler.url": server.url, "data.max_prompt_tokens": 24}
    keys = served | {"train.train_batch": 6} | keys
    config = run_config(directory, **keys)
    policy = Checkpoint(config.model.path)
    task = load_task(config, policy, splits=("train",), workers=workers)
    settings = {"max_positions": 128, "vocab_size": 64}
    connection = Connection(VllmSampler, (server.url,), settings)
    sampler = VllmSampler(connection.urls, **settings)
    serving = Serving(sampler, lambda *_, **__: {}, connection=connection)
    runner = None
    if workers is None:
        runner = make_episode_runner(config, task.tokenizer, task.tools, vocab_size=64)
    return RolloutSource(
        config=config,
        task=task,
        sampler=sampler,
        params=training_params(config.sampling, policy, seed=config.seed),
        episode_runner=runner,
        reward_model=None,
        teacher=None,
        note=lambda text: None,
        workers=_group_workers(config, serving, workers, weights=task.weights),
    )
