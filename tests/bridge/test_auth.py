"""The middleware that guards a server, called as vLLM's ASGI server calls it."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.bridge.in_vllm import auth

KEY = {"Authorization": "Bearer secret", "Host": "127.0.0.1:8000"}


@pytest.fixture(autouse=True, scope="module")
def key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(auth.KEY, "secret")
        yield


def status(path: str, headers: dict[str, str] | list[tuple[str, str]], kind: str = "http") -> int:
    """Returns the status of a response; 0 if a websocket was closed."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body of a refused request is not read")

    pairs = headers.items() if isinstance(headers, dict) else headers
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs]
    scope = {"type": kind, "path": path, "headers": encoded}
    asyncio.run(auth.RequireKey(app)(scope, receive, send))
    if sent[0].get("status", 0) in (401, 403):
        assert json.loads(sent[1]["body"])["error"]
    return sent[0].get("status", 0)


@pytest.mark.parametrize("path", ["/pause", "/resume", "/update_weights", "/health", "/metrics"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:3000",
        "http://localhost:8000",
        "https://127.0.0.1:8000.evil.example",
        "http://127.0.0.1:8000@evil.example",
        "null",
        "",
        "http://[",
        "\xff",
    ],
)
def test_web_pages_of_other_origins_are_refused(path: str, origin: str) -> None:
    """Also with the key and where none is needed."""
    assert status(path, KEY | {"Origin": origin}) == 403
    assert status(path, {"Origin": origin}) == 403
    twice = [*KEY.items(), ("Origin", "http://127.0.0.1:8000"), ("Origin", origin)]
    assert status(path, twice) == 403


def test_same_origin_and_programs_pass() -> None:
    assert status("/pause", KEY) == 200
    assert status("/pause", KEY | {"Origin": "http://127.0.0.1:8000"}) == 200
    assert status("/health", {}) == 200
    assert status("/metrics", {}) == 200


@pytest.mark.parametrize("path", ["/pause", "/health/", "//health", "/health/../pause", "/v1", ""])
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer secre", "secret"])
def test_requests_without_the_key_are_refused(path: str, given: str | None) -> None:
    assert status(path, {} if given is None else {"Authorization": given}) == 401
    assert status(path, [*KEY.items(), ("Authorization", given or "")]) == 401


def test_websockets_are_closed() -> None:
    assert status("/v1/realtime", {}, "websocket") == 0
    assert status("/v1/realtime", KEY | {"Origin": "http://evil.example"}, "websocket") == 0
    assert status("/v1/realtime", KEY, "websocket") == 200


def test_empty_key_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.KEY, "")
    with pytest.raises(ValueError, match="JAXRL_API_KEY is empty"):
        status("/pause", {"Authorization": "Bearer "})


OWN = "http://127.0.0.1:8000"
VALUES = st.sampled_from(["Bearer secret", OWN, "127.0.0.1:8000", "", "null"]) | st.text(
    st.characters(max_codepoint=255), max_size=30
)


@settings(max_examples=2000)
@given(
    path=st.sampled_from(["/pause", "/health", "/metrics", ""]) | st.text(max_size=20),
    headers=st.lists(
        st.tuples(st.sampled_from(["Authorization", "Origin", "Host", "X"]), VALUES), max_size=6
    ),
    kind=st.sampled_from(["http", "websocket"]),
)
def test_no_request_slips_through(path: str, headers: list[tuple[str, str]], kind: str) -> None:
    values = {name: [v for n, v in headers if n == name] for name, _ in headers}
    if status(path, headers, kind) == 200:
        for origin in values.get("Origin", []):
            assert origin.removeprefix("https://").removeprefix("http://") in values["Host"]
        assert path in ("/health", "/metrics") or values["Authorization"] == ["Bearer secret"]
