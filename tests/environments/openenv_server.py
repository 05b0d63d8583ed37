"""A stand-in for an OpenEnv server: a game of guessing numbers behind its protocol."""

import http
import json
import threading
from contextlib import contextmanager

from websockets.sync.server import serve

FIELDS = {"metadata": {"type": "object"}, "guess": {"type": "integer"}}
SCHEMA = {"action": {"properties": FIELDS, "required": ["guess"]}}


def answer(message, number):
    """Returns the server's answer while the number to guess is `number`."""
    if message["type"] == "reset":
        return observe("Guess!")
    guess = message["data"]["guess"]
    if guess < 0:
        return error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["guess"]}])
    if guess == 13:
        return error("EXECUTION_ERROR", "unlucky")
    right = guess == number
    return observe("no" * guess, reward=0.5 + right, done=right)


def observe(text, *, reward=None, done=False):
    data = {"observation": {"said": text, "empty": None}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code, message, **more):
    return {"type": "error", "data": {"code": code, "message": message, **more}}


@contextmanager
def serving():
    """Yields (url, the messages of each session, an event of each that is set at its end)."""
    sessions, ended = [], []

    def play(connection):
        seen, end, number = [], threading.Event(), 0
        sessions.append(seen)
        ended.append(end)
        for text in connection:
            seen.append(message := json.loads(text))
            if message["type"] == "close":
                break
            number = message["data"].get("seed", number)
            connection.send(json.dumps(answer(message, number)))
        end.set()

    def describe(connection, request):
        if request.path == "/schema":
            return connection.respond(http.HTTPStatus.OK, json.dumps(SCHEMA))
        return None

    with serve(play, "127.0.0.1", 0, process_request=describe) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", sessions, ended
