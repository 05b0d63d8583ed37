"""Sessions of OpenEnv servers, as text games.

The protocol: a session is a WebSocket at /ws; the messages are JSON, `reset` and `step` to the
server, `observation` and `error` back. A server describes its actions at /schema.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx2

_CAST = {"integer": int, "number": float, "string": str}
_INVALID = ("VALIDATION_ERROR", "INVALID_JSON")  # errors that the action caused
_LARGEST = 64 << 20  # bytes of a message


class Server(NamedTuple):
    """An OpenEnv server."""

    url: str  # http:// or https://
    # Field of the action that gets the policy's text; None if the text is the action as JSON.
    action: str | None
    cast: type  # converts the text to the field's value
    # Format string over the fields of an observation; None shows them as JSON.
    observation: str | None

    @classmethod
    def at(cls, url: str, *, action: str | None, observation: str | None) -> "Server":
        """Reads the schema of the server's actions; raises ValueError without a server at `url`, or
        if its actions have no field `action`. Default is the only field that an action requires."""
        url = url.rstrip("/")
        try:
            reply = httpx2.get(f"{url}/schema", timeout=30).raise_for_status()
            schema = reply.json()["action"]
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"environment.url = {url!r}: no OpenEnv server: {error!r}") from error
        fields, required = schema.get("properties", {}), schema.get("required", [])
        if action is not None and action not in fields:
            raise ValueError(
                f"environment.action = {action!r}: the actions at {url} have no such field; they "
                f"have {', '.join(fields) or 'none'}"
            )
        field = action or (required[0] if len(required) == 1 else None)
        kind = str(fields[field].get("type")) if field is not None else ""
        return cls(url, field, _CAST.get(kind, str), observation)

    def message(self, text: str) -> dict[str, Any]:
        """Returns the action of a turn; raises ValueError if the text is not an action."""
        if self.action is not None:
            return {self.action: self.cast(text)}
        try:
            action = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"{text!r:.80} is nested too deeply") from error
        if not isinstance(action, dict):
            raise ValueError(f"{text!r:.80} is not a JSON object")
        return action

    def show(self, observation: Mapping[str, Any]) -> str:
        """Renders an observation as text."""
        if self.observation is not None:
            return self.observation.format_map(observation)
        return json.dumps({k: v for k, v in observation.items() if v not in (None, [], {}, "")})


class Session:
    """One episode at a server: a game for `TextGame`."""

    def __init__(self, server: Server) -> None:
        """Connects; raises OSError if the server cannot be reached, RuntimeError without the
        package websockets."""
        try:
            from websockets.sync.client import connect
        except ModuleNotFoundError as error:
            raise RuntimeError(
                f"OpenEnv needs {error.name}: pip install 'jaxrl[openenv]'"
            ) from error
        self._server = server
        self._open = contextlib.ExitStack()  # websockets wants `connect` entered as a context
        self._socket = self._open.enter_context(
            connect(f"ws{server.url.removeprefix('http')}/ws", open_timeout=30, max_size=_LARGEST)
        )

    def reset(self, **arguments: Any) -> tuple[str, Mapping[str, Any]]:
        """Begins the episode; raises RuntimeError if the server refuses."""
        data = self._ask("reset", arguments)
        return self._server.show(data["observation"]), {}

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Takes an action; raises RuntimeError if the environment fails. An invalid action is
        reported to the policy and counted."""
        try:
            data = self._ask("step", self._server.message(text))
        except ValueError as error:
            answer = f"Invalid action: {error}"
            return answer, 0.0, False, {"metrics": {"invalid_actions": 1}}
        done = bool(data["done"])
        observation = "" if done else self._server.show(data["observation"])
        metrics = {"metrics": {"invalid_actions": 0}}
        return observation, float(data["reward"] or 0.0), done, metrics

    def close(self) -> None:
        """Ends the session."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            self._socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        text = self._socket.recv()
        try:
            reply = json.loads(text)
        except ValueError as error:
            raise RuntimeError(
                f"{self._server.url}: {kind} failed: the answer {text!r:.80} is no JSON"
            ) from error
        data = reply["data"]
        if reply["type"] != "error":
            return dict(data)
        message = str(data.get("message"))
        if data.get("code") in _INVALID:
            raise ValueError(f"{message}: {data.get('errors', '')}"[:500])
        if data.get("code") == "CAPACITY_REACHED":
            message += "; set max_concurrent_envs of the server to the episodes of a step or more"
        raise RuntimeError(f"{self._server.url}: {kind} failed: {data.get('code')}: {message}")
