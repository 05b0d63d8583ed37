"""Every parameter of the official clients is read, ignored as the docs say, or refused by name."""

from pathlib import Path
from typing import Any

import anthropic.types.beta.message_create_params
import openai.types.chat.completion_create_params
import openai.types.responses.response_create_params
import pytest

from jaxrl.environments.gateway import parameters
from jaxrl.environments.gateway.anthropic_messages import MESSAGES
from jaxrl.environments.gateway.dialect import Dialect, TurnRefusedError, TurnRequest
from jaxrl.environments.gateway.openai_chat import CHAT
from jaxrl.environments.gateway.openai_responses import RESPONSES

DOCS = Path(__file__).parents[2] / "docs"
USER = [{"role": "user", "content": "hello"}]
APIS = {
    "chat": (
        (CHAT, parameters.CHAT, {"messages": USER}),
        openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming,
    ),
    "responses": (
        (RESPONSES, parameters.RESPONSES, {"input": "hello"}),
        openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming,
    ),
    "messages": (
        (MESSAGES, parameters.MESSAGES, {"messages": USER, "max_tokens": 9}),
        anthropic.types.beta.message_create_params.MessageCreateParamsNonStreaming,
    ),
}


def read(api: str, content: dict[str, Any]) -> TurnRequest:
    (dialect, _, body), _ = APIS[api]
    assert isinstance(dialect, Dialect)
    return dialect.read({"model": "policy"} | body | content)


@pytest.mark.parametrize("api", APIS)
def test_each_parameter_of_the_client_is_known(api: str) -> None:
    (_, known, _), client = APIS[api]
    names = [{name.partition(".")[0] for name in use} for use in known]
    assert client.__required_keys__ | client.__optional_keys__ <= set.union(*names)
    for name in {name for use in known for name in use}:
        assert sum(name in use for use in known) == 1, name
    page = (DOCS / "environments.md").read_text()
    assert [name for name in known.ignored if f"`{name}`" not in page] == []


@pytest.mark.parametrize("api", APIS)
def test_what_the_policy_cannot_follow_is_refused_by_its_name_and_value(api: str) -> None:
    (_, known, _), _ = APIS[api]
    for name, refusal in known.refused.items():
        outer, _, inner = name.partition(".")
        with pytest.raises(TurnRefusedError, match=refusal.advice) as refused:
            read(api, {outer: {inner: ["wanted"]} if inner else ["wanted"]})
        assert (refused.value.kind, str(refused.value)[: len(name)]) == ("invalid", name)
        assert "['wanted']" in str(refused.value)
        for value in (None, [], *refusal.allowed):
            read(api, {outer: {inner: value} if inner else value})
    with pytest.raises(TurnRefusedError, match=r"min_p = 0\.1: the gateway knows no such"):
        read(api, {"min_p": 0.1})


@pytest.mark.parametrize("api", APIS)
def test_settings_of_sampling_are_read(api: str) -> None:
    settings = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": 3}
    assert read(api, settings).sampling == (0, 0.5, 7, 3)
    assert read(api, {}).sampling == (None, None, None, None)
    for wrong in (
        *({"temperature": value} for value in (-1, "1", True, float("nan"), float("inf"))),
        *({"top_p": value} for value in (0, 1.5)),
        *({"top_k": value} for value in (-2, 1.0)),
        {"seed": "3"},
    ):
        with pytest.raises(TurnRefusedError, match=f"{next(iter(wrong))} = .*: it must be "):
            read(api, wrong)
