"""Episodes of verifiers environments: the protocol between the two processes, against a stand-in
for the package with the few names that the host uses."""

import functools
import json
import sys

import numpy as np
import pytest

from jaxrl.data.prompts import Example
from jaxrl.environments import builtin
from jaxrl.environments.connectors.verifiers import Host
from jaxrl.environments.episodes.runner import EpisodeRunner, LockstepScheduler
from jaxrl.sampling.base import SamplingParams
from tests.environments.test_openenv import LIMITS, Guesses
from tests.environments.test_tools import QWEN_TOKENIZER as TOKENIZER

V1 = """
class Env: pass
class EnvConfig:
    def __init__(self, table): self.table = table
    model_validate = classmethod(lambda cls, table: cls(table))
class EvalClientConfig:
    def __init__(self, base_url): self.base_url = base_url
class ModelContext:
    def __init__(self, model, client): self.model, self.client = model, client
"""
ENV = """
import asyncio, contextlib, json, os, urllib.request
from types import SimpleNamespace as Of
from verifiers.v1 import Env

print("a library that prints")

class RunSlot:
    def __init__(self, task): self.task = task

class Sums(Env):
    taskset = ["add", "rewrite", "twice", "raise", "exit"]

    @contextlib.asynccontextmanager
    async def serving(self): yield

    async def run_slot(self, slot, context):
        body = {"model": context.model, "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Add."}]},
            {"role": "user", "content": "2+3"}], "stream": slot.task == "add"}
        if slot.task == "raise":
            raise OSError("no sandbox")
        if slot.task == "exit":
            os._exit(1)
        def ask():
            data = json.dumps(body | {"tools": [{"type": "function", "function": {"name": "add"}}]})
            url = context.client.base_url + "/chat/completions"
            text = urllib.request.urlopen(urllib.request.Request(url, data.encode())).read()
            if body["stream"]:
                chunk = json.loads(text.decode().split("\\n\\n")[0].removeprefix("data: "))
                return chunk["choices"][0]["delta"]
            return json.loads(text)["choices"][0]["message"]
        if slot.task == "twice":
            await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(2)))
        first = await asyncio.to_thread(ask)
        if slot.task == "rewrite":
            body["messages"][1] = {"role": "user", "content": "a summary"}
        body["messages"] += [first, {"role": "tool", "content": first.get("tool_calls") and
            first["tool_calls"][0]["function"]["arguments"] or "none"}]
        second = await asyncio.to_thread(ask)
        score = float("5" in second["content"])
        part = Of(score=score)
        trace = Of(agent=Of(trainable=True), rewards={"right": part}, metrics={"none": None},
                   reward=score, errors=[])
        return Of(ok=True, errors=[], traces=[trace])
"""
LOADERS = """
from verifiers.v1.env import Sums
def environment_class(taskset, env):
    assert taskset == "sums"
    return Sums
def load_environment(config): return Sums()
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    directory = tmp_path_factory.mktemp("python")
    package = directory / "verifiers" / "v1"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text(V1)
    (package / "env.py").write_text(ENV)
    (package / "utils/loaders.py").write_text(LOADERS)
    (package / "utils/generic.py").write_text("def concrete_type(*_, **__): return None\n")
    (directory / "env.toml").write_text('[taskset]\nid = "sums"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        given = sys.executable, str(directory / "env.toml")
        made = builtin._host(*given)
        yield given
        made.close()


def play(host, task, texts):
    context = builtin.EnvironmentContext(TOKENIZER, {}, limits=LIMITS)
    make = functools.partial(builtin.verifiers, context, python=host[0], config=host[1])
    example = Example(np.array([2]), {}, {"task": task})
    episodes = EpisodeRunner(make, LIMITS, LockstepScheduler)
    sampler = Guesses({(0, j): turns for j, turns in enumerate(texts)})
    params = SamplingParams(max_tokens=400, stop=(), seed=0)
    return episodes.run({0: example}, sampler=sampler, params=params, group_size=len(texts))


def test_messages_append_and_reward_ends(host):
    end = "<|im_end|>"
    right, wrong = play(
        host, 0, [[f"I call.{CALL}{end}", f"5{end}"], [f"no call{end}", f"4{end}"]]
    )[0]
    prompt = TOKENIZER.decode(right.prompt, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n")
    assert "Add." in prompt
    assert json.dumps("add") in prompt  # the tools are shown
    assert [reward for _, _, reward in right.episode.turns] == [0, 1]
    assert dict(right.episode.metrics) == {"right": 1, "branches": 0}
    said = TOKENIZER.decode(right.completion, skip_special_tokens=False)
    assert said == (
        f"I call.{CALL}{end}\n<|im_start|>user\n<tool_response>\n" + '{"a": 2}'
        f"\n</tool_response>{end}\n<|im_start|>assistant\n5{end}"
    )
    sampled = [TOKENIZER.decode(right.completion[a:b]) for a, b, _ in right.episode.turns]
    assert sampled == [f"I call.{CALL}{end}", f"5{end}"]
    assert right.action_mask.sum() == sum(b - a for a, b, _ in right.episode.turns)
    assert "none" in TOKENIZER.decode(wrong.completion)
    assert [reward for _, _, reward in wrong.episode.turns] == [0, 0]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (3, "no sandbox"),
        (4, "the process that runs the environment has ended"),
        (5, "task 5 is not in the taskset; it has 5"),
        ("4", "the column task is '4'"),
    ],
)
def test_non_sequence_episode_fails_alone(host, task, message):
    rollouts, failure = play(host, task, [["5", "5"]])
    assert message in failure
    assert rollouts[0].episode.failed
    assert play(host, 0, [["5", "5"]]).rollouts[0].episode.end == "done"


@pytest.mark.parametrize(("task", "sequences"), [(1, 2), (2, 3)])
def test_changed_history_and_turns_at_once_are_sequences_of_the_episode(host, task, sequences):
    turns = ["5<|im_end|>"] * 4
    (rollout,), failure = play(host, task, [turns])
    assert failure is None
    assert rollout.episode.end == "done"
    assert sum(reward for _, _, reward in rollout.episode.turns) == 1
    assert len(rollout.branches) + 1 == sequences


def test_unloadable_environment_is_named(tmp_path):
    (tmp_path / "env.toml").write_text("")
    with pytest.raises(ValueError, match=r"environment\.config = .* cannot run it"):
        Host(sys.executable, str(tmp_path / "env.toml"))
    with pytest.raises(ValueError, match=r"environment\.python = 'nowhere' does not exist"):
        Host("nowhere", str(tmp_path / "env.toml"))
