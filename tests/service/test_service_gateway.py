"""Official clients of OpenAI and Anthropic talk to a service's weights; their session trains."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tinker import types

from jaxrl.environments import Chat, Conversations, EpisodeLimits, Templates, TurnRequest
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import Completion
from jaxrl.service.gateway import Recorded
from tests import tiny
from tests.service.serving import KEYS, QUIET, Server
from tests.service.test_client import ADAM

pytestmark = pytest.mark.filterwarnings(*QUIET)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("gateway")
    model = tiny.write_checkpoint(directory / "model")
    made = Server(model, directory / "run", "--precision", "fp32")
    yield made
    made.stop()


def fetch(server: Server, path: str, *, key: str = KEYS[0]) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers={"x-api-key": key}, timeout=250)


def test_a_session_is_recorded_as_it_was_sampled(server: Server) -> None:
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        agent = openai.OpenAI(base_url=f"{server.url}/s/one/v1", api_key=KEYS[0])
        messages: list = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            chat = agent.chat.completions.create(
                model=client.model_id, messages=messages, max_completion_tokens=5
            )
            said = chat.choices[0].message
            messages += [{"role": "assistant", "content": said.content}]
            messages += [{"role": "user", "content": "again"}]
        other = anthropic.Anthropic(base_url=f"{server.url}/s/one", api_key=KEYS[0])
        other.messages.create(
            model="tiny", max_tokens=4, messages=[{"role": "user", "content": "other"}]
        )
        reward = {"reward": 2.0, "metrics": {"solved": 1}}
        httpx.post(
            f"{server.url}/s/one/reward", json=reward, headers={"x-api-key": KEYS[0]}, timeout=250
        ).raise_for_status()
        found = fetch(server, "/s/one").json()
        assert (found["reward"], found["metrics"]) == (2.0, {"solved": 1.0})
        chain, apart = found["sequences"]
        assert (chain["model"], apart["model"]) == (client.model_id, "tiny")
        assert 2 <= sum(chain["mask"]) <= 10
        # The weights that sampled the turns give the same log-probs.
        path = client.save_weights_for_sampler("now").result().path
        sampler = service.create_sampling_client(model_path=path)
        prompt = types.ModelInput.from_ints(chain["tokens"])
        scored = sampler.compute_logprobs(prompt).result()
        for mine, expected, sampled in zip(chain["logprobs"], scored, chain["mask"], strict=True):
            assert mine == (pytest.approx(expected, abs=1e-5) if sampled else 0)
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(one["model_input"]),
                loss_fn_inputs=one["loss_fn_inputs"],
            )
            for one in found["datums"][:1]
        ]
        assert set(data[0].loss_fn_inputs["advantages"].data) == {0.0, 2.0}
        done = client.forward_backward(data, "importance_sampling").result()
        assert abs(done.metrics["mismatch/kl:mean"]) < 1e-5
        client.optim_step(ADAM).result()
        # The model's present weights are others now.
        before = fetch(server, "/s/one").json()["sequences"]
        agent.chat.completions.create(
            model=client.model_id, messages=messages[:1], max_completion_tokens=5
        )
        third = fetch(server, "/s/one").json()["sequences"]
        assert third[: len(before)] == before
        stale = sampler.compute_logprobs(types.ModelInput.from_ints(third[-1]["tokens"])).result()
        mask = np.array(third[-1]["mask"], bool)
        own = np.array(third[-1]["logprobs"])[mask]
        assert np.abs(own - np.array(stale, float)[mask]).max() > 1e-3


def test_a_sequence_has_the_turns_of_one_model_and_their_versions(server: Server) -> None:
    agent = openai.OpenAI(base_url=f"{server.url}/s/mixed/v1", api_key=KEYS[0])
    messages: list = [{"role": "user", "content": "hello"}]
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        for model in ("tiny", client.model_id, "step", client.model_id):
            if model == "step":
                client.optim_step(ADAM).result()
                continue
            chat = agent.chat.completions.create(
                model=model, messages=messages, max_completion_tokens=4
            )
            messages += [{"role": "assistant", "content": chat.choices[0].message.content}]
            messages += [{"role": "user", "content": "again"}]
    base, own = fetch(server, "/s/mixed").json()["sequences"]
    assert (base["model"], own["model"]) == ("tiny", client.model_id)
    assert own["tokens"][: len(base["tokens"])] == base["tokens"]
    assert [one["version"] for one in base["turns"]] == ["tiny"]
    versions = [f"{client.model_id}@{seq}" for seq in (0, 1)]
    assert [one["version"] for one in own["turns"]] == versions
    for one in (base, own):
        marked = [place for turn in one["turns"] for place in range(turn["begin"], turn["end"])]
        assert marked == np.flatnonzero(one["mask"]).tolist()
        assert not np.any(np.array(one["logprobs"])[np.array(one["mask"]) == 0])


def test_turns_of_a_session_may_overlap(server: Server) -> None:
    agent = openai.OpenAI(base_url=f"{server.url}/s/many/v1", api_key=KEYS[0])
    first = agent.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=4
    )
    said = [{"role": "user", "content": "hello"}]
    said += [{"role": "assistant", "content": first.choices[0].message.content}]

    def ask(text: str) -> str | None:
        messages: list = [*said, {"role": "user", "content": text}]
        found = agent.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=6
        )
        return found.choices[0].message.content

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, ("one", "two", "three")))
    sequences = fetch(server, "/s/many").json()["sequences"]
    tokenizer = Checkpoint(server.model).tokenizer
    turns = []
    for one in sequences:
        turn = np.flatnonzero(np.diff([0, *one["mask"]]) == 1)[-1]
        # An answer is without special tokens, which a random model writes.
        own = tokenizer.decode(one["tokens"][turn:], skip_special_tokens=True)
        turns.append((tokenizer.decode(one["tokens"][:turn]), own))
    assert len(turns) == 3
    for text, answer in zip(("one", "two", "three"), answers, strict=True):
        assert sum(text in before and answer == own for before, own in turns) == 1
    # The turn that they share is marked in one of them.
    assert sum(sum(one["mask"]) for one in sequences) <= 4 + 3 * 6


def test_a_place_that_was_found_earlier_is_answered_later(server: Server) -> None:
    templates = Templates(Chat(Checkpoint(server.model).tokenizer))
    limits = EpisodeLimits(2**31, 2**31, 2**31, 0.0, 64)
    made = Recorded(Conversations(templates, limits))
    turns = [np.arange(5, 9, dtype=np.int32), np.arange(20, 22, dtype=np.int32)]
    places = [
        made.place(TurnRequest("tiny", [{"role": "user", "content": text}]))[0]
        for text in ("first", "second")
    ]
    for place, turn in reversed(list(zip(places, turns, strict=True))):
        made.add(
            place, Completion(0, 0, turn, np.zeros(len(turn)), np.zeros(len(turn)), "length"), ""
        )
    for sequence, place, turn in zip(made.sequences(), places[::-1], turns[::-1], strict=True):
        assert sequence["tokens"] == [*place.tokens, *turn]
        assert sequence["mask"] == [0] * len(place.tokens) + [1] * len(turn)


def test_settings_of_sampling_hold(server: Server) -> None:
    agent = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0])
    said = list[str | None]()
    for settings in ({"temperature": 0.0}, {"temperature": 1e-6, "top_p": 0.5}, {"seed": 5}) * 2:
        asked: dict[str, Any] = {"model": "tiny", "max_completion_tokens": 8, **settings}
        found = agent.chat.completions.create(
            messages=[{"role": "user", "content": "hello"}], **asked
        )
        said.append(found.choices[0].message.content)
    assert said[:3] == said[3:]
    assert said[0] == said[1] != said[2]


def test_keys_and_names_are_checked(server: Server) -> None:
    messages: list = [{"role": "user", "content": "hello"}]
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-other")
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="tiny", messages=messages)
    agent = openai.OpenAI(base_url=f"{server.url}/s/two/v1", api_key=KEYS[0])
    with pytest.raises(openai.NotFoundError, match="save_weights_for_sampler"):
        agent.chat.completions.create(model="tinker://none", messages=messages)
    assert [one.id for one in agent.models.list()] == ["tiny"]
    for content, expected in (
        ({"model": None}, "model is None; expected a text"),
        ({}, "the request lacks 'model'"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "a" * 200}]}, "takes 128 with"),
    ):
        body, headers = {"messages": messages} | content, {"x-api-key": KEYS[0]}
        url = f"{server.url}/v1/chat/completions"
        refused = httpx.post(url, json=body, headers=headers, timeout=250)
        assert (refused.status_code, expected in refused.text) == (400, True), refused.text
    agent.responses.create(model="tiny", input="hello", max_output_tokens=4)
    assert fetch(server, "/s/two", key=KEYS[1]).status_code == 404
    for content in ('{"reward": NaN}', '{"reward": 1, "metrics": {"n": 1e999}}'):
        url, headers = f"{server.url}/s/two/reward", {"x-api-key": KEYS[0]}
        refused = httpx.post(url, content=content, headers=headers, timeout=250)
        assert (refused.status_code, "finite" in refused.text) == (400, True)
    refused = fetch(server, "/s/two?advantage=nan")
    assert (refused.status_code, "finite" in refused.text) == (400, True)
    found = fetch(server, "/s/two").json()
    assert (len(found["sequences"]), found["reward"], found["metrics"]) == (1, 0.0, {})
