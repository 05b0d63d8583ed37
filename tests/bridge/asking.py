"""Greedy completions of a real server, with the version of each token."""

import http.client
import json
import urllib.parse
from contextlib import closing
from typing import Any, NamedTuple

from jaxrl.bridge.in_vllm import auth
from jaxrl.bridge.servers.launch import LocalServer

KEY = "a key"


class Output(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]  # of each token; -1 before the first publish
    finish_reason: str


def ask(server: LocalServer, prompt: list[int], max_tokens: int) -> Output:
    """Asks for a greedy completion that ignores EOS."""
    body = {
        "token_ids": prompt,
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
        },
    }
    address = urllib.parse.urlsplit(server.url).netloc
    headers = {"Content-Type": "application/json", **auth.headers(KEY)}
    with closing(http.client.HTTPConnection(address, timeout=250)) as connection:
        connection.request("POST", "/inference/v1/generate", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
    assert response.status == 200, text
    choice: dict[str, Any] = json.loads(text)["choices"][0]
    versions = [
        -1 if span["version"] == "default" else int(span["version"].partition("@")[0])
        for span in choice["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
    return Output(choice["token_ids"], logprobs, versions, choice["finish_reason"])
