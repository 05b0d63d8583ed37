"""Parts of tests of the gateway: a policy that says given texts, and clients."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.sampling.base import Completion


class Scripted:
    """Answers with texts in turn, a token for each character: other ids than the tokenizer's for
    the same text. Log-probs and versions rise with every token."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts = tokenizer, iter(texts)
        self.contexts: list[np.ndarray] = []
        self.sampled: list[Completion] = []

    def sample_turns(self, turns, params):
        for turn in turns:
            self.contexts.append(turn.context)
            # One token for each character: ids that no tokenizer would choose for the text.
            parts = self._parts(next(self.texts))
            tokens = np.array(parts[: turn.max_tokens], np.int32)
            begin = 100 * len(self.sampled)
            numbers = np.arange(begin, begin + len(tokens))
            reason = "stop" if len(parts) <= turn.max_tokens else "length"
            done = Completion(
                turn.prompt_index,
                turn.sample_index,
                tokens,
                -numbers.astype(np.float32),
                numbers.astype(np.int32),
                reason,
            )
            self.sampled.append(done)
            yield done

    def _parts(self, text: str) -> list[int]:
        whole = self.tokenizer.encode(text, add_special_tokens=False)
        ids = [self.tokenizer.decode([i]) for i in whole]
        return [
            i
            for token, piece in zip(whole, ids, strict=True)
            for i in (
                [token]
                if piece.startswith("<") or not piece.isascii()
                else [
                    self.tokenizer.encode(character, add_special_tokens=False)[0]
                    for character in piece
                ]
            )
        ]


def chat(url: str, messages: list[Any], **more: Any) -> Any:
    body = {"model": "policy", "messages": messages, **more}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=100)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def message_of(reply: Any) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def result(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def sequences(rollout: Rollout) -> list[Rollout]:
    return [*rollout.branches, rollout]


def trained(rollout: Rollout) -> list[tuple[int, float, int]]:
    """Token, log-prob and version of every action of an episode, in order."""
    found = [
        (int(t), float(p), int(v))
        for one in sequences(rollout)
        for t, p, v, acts in zip(
            one.completion, one.logprobs, one.version, one.action_mask, strict=True
        )
        if acts
    ]
    return sorted(found, key=lambda entry: entry[2])


def sampled(sampler: Scripted) -> list[tuple[int, float, int]]:
    return [
        (int(t), float(p), int(v))
        for done in sampler.sampled
        for t, p, v in zip(done.tokens, done.logprobs, done.versions, strict=True)
    ]


def stream(url: str, body: Mapping[str, Any]) -> list[Any]:
    text = httpx2.post(url, json={**body, "stream": True}, timeout=100).text
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
