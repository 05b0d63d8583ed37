"""Episodes at a server that speaks OpenEnv's protocol."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.data.prompts import Example
from jaxrl.environments import builtin
from jaxrl.environments.connectors.openenv import Server, Session
from jaxrl.environments.episodes.base import EpisodeLimits
from jaxrl.environments.episodes.runner import EpisodeRunner, LockstepScheduler
from jaxrl.sampling.base import Completion, SamplingParams
from tests.environments.openenv_server import serving
from tests.environments.test_tools import QWEN_TOKENIZER as TOKENIZER

LIMITS = EpisodeLimits(
    max_turns=4, max_tokens=400, max_prompt_tokens=200, timeout=600.0, vocab_size=1000
)


class Guesses:
    """Plays the texts of each prompt, one a turn."""

    def __init__(self, texts):
        self.texts, self.turns = texts, dict.fromkeys(texts, 0)

    def sample_turns(self, turns, params):
        for context, i, j, *_ in turns:
            del context
            text = self.texts[i, j][self.turns[i, j]]
            self.turns[i, j] += 1
            tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)
            zeros = np.zeros(len(tokens), np.float32)
            yield Completion(i, j, tokens, zeros, zeros.astype(np.int32), "stop")


def play(url, texts, *, row):
    context = builtin.EnvironmentContext(TOKENIZER, {})
    make = functools.partial(builtin.openenv, context, url=url, observation="{said}")
    example = Example(np.array([2]), {"rendered_prompt": "Number? {observation}"}, row)
    episodes = EpisodeRunner(make, LIMITS, LockstepScheduler)
    sampler = Guesses({(0, j): turns for j, turns in enumerate(texts)})
    params = SamplingParams(max_tokens=400, stop=(), seed=0)
    return episodes.run({0: example}, sampler=sampler, params=params, group_size=len(texts))


def test_an_episode_is_played_at_a_server():
    """The first guess is wrong, a second no number, a third refused, the last right."""
    with serving() as (url, sessions, ended):
        texts = [["3", "seven", "-1", "7"], ["7"], ["13"]]
        found = play(url, texts, row={"seed": 7})
        whole, short, failed = found.rollouts
        assert all(event.wait(250) for event in ended)  # every session was closed
    said = TOKENIZER.decode(whole.completion, skip_special_tokens=False)
    assert "nonono" in said
    assert "Invalid action: invalid literal for int" in said
    assert "Invalid action: Invalid message" in said
    assert [reward for _, _, reward in whole.episode.turns] == [0.5, 0, 0, 1.5]
    assert whole.episode.end == "done"
    assert dict(whole.episode.metrics) == {"invalid_actions": 2}
    # Sampled turns are the ids that were sampled; observations are context.
    sampled = [whole.completion[start:end] for start, end, _ in whole.episode.turns]
    assert [TOKENIZER.decode(ids, skip_special_tokens=False) for ids in sampled] == texts[0]
    assert whole.action_mask.sum() == sum(map(len, sampled))
    prompt = TOKENIZER.encode("Number? Guess!", add_special_tokens=False)
    assert whole.prompt.tolist() == short.prompt.tolist() == prompt
    assert (failed.episode.end, "unlucky" in found.first_failure) == ("error", True)
    by_length = sorted(sessions, key=len)
    assert [m["type"] for m in by_length[-1]] == ["reset", "step", "step", "step", "close"]
    assert all(messages[0] == {"type": "reset", "data": {"seed": 7}} for messages in sessions)


def test_a_long_message_arrives():
    with serving() as (url, sessions, _):
        server = Server.at(url, action=None, observation="{said}")
        session = Session(server)
        session.reset(seed=-1, padding="ä" * 2**17)
        assert session.step(str(2**20))[0] == "no" * 2**20
        session.close()
        assert sessions[0][0]["data"]["padding"] == "ä" * 2**17


def test_invalid_server_or_field_is_named():
    with pytest.raises(ValueError, match=r"environment\.url = 'http://127\.0\.0\.1:9': no OpenEnv"):
        Server.at("http://127.0.0.1:9/", action=None, observation=None)
    with serving() as (url, _, _):
        with pytest.raises(ValueError, match=r"'move'.*no such field; they have metadata, guess"):
            Server.at(url, action="move", observation=None)
        shown = Server.at(url, action=None, observation=None).show({"a": 1, "b": None, "c": []})
        assert shown == '{"a": 1}'


def test_a_fault_of_the_policy_and_one_of_the_server_are_told_apart():
    session = object.__new__(Session)
    session._server = Server("http://there", None, str, None)
    session._socket = SimpleNamespace(send=lambda text: None, recv=lambda: "<html>")
    _, _, done, info = session.step("[" * 100_000)  # deeper than Python's parser goes
    assert (done, info["metrics"]) == (False, {"invalid_actions": 1})
    with pytest.raises(RuntimeError, match=r"http://there: step failed: .*<html>"):
        session.step("{}")
