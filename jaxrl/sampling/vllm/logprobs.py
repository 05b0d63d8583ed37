"""Log-probs of given tokens from vLLM servers: under the policy's weights, or a teacher's."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl.sampling.base import Turn, check_turns
from jaxrl.sampling.vllm.router import Router

_ROUNDING = 1e-4  # a log-prob above 0 by less is rounded to 0; by more it is invalid


class VllmScorer:
    """Requests log-probs of given tokens from vLLM servers, under the weights they hold."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_positions: int,
        vocab_size: int,
        max_requests: int = 32,
        timeout: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Makes the client without connecting.

        Args:
          urls: addresses of the servers, such as http://127.0.0.1:8000.
          max_positions: the model's longest sequence, in tokens.
          vocab_size: number of the model's tokens.
          max_requests: concurrent requests per server.
          timeout: seconds after which a request is sent again.
          headers: of every request, such as the server's key.

        Raises:
          ValueError: if `urls` is empty or has an entry that is not an http:// address.
        """
        self._max_positions, self._vocab_size = max_positions, vocab_size
        self._router = Router(
            urls, max_requests=max_requests, timeout=timeout, headers=headers or {}
        )
        self._max_requests, self._most = max_requests, 0  # requests, of a server and of all
        self._pools = list[ThreadPoolExecutor]()  # the last one takes new requests
        self._make_room(len(urls))

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes the log-probs of given tokens in one forward pass per sequence.

        They are at temperature 1 without truncation: vLLM computes no others for a prompt, and one
        token's log-prob does not determine its value at another temperature.

        Returns:
          For each sequence, i32[T], its f32[T]: entry t is log p(tokens[t] | tokens[:t]). Entry 0
          is NaN. So is the last entry of a sequence that fills the model's positions, because the
          server samples one more token than it scores.

        Raises:
          ValueError: if a sequence is empty, too long or outside the vocabulary.
          SamplerError: if a server does not answer after several attempts, or its weights are not
            the ones to score with.
          ClosedError: if it is closed meanwhile.
        """
        turns = check_turns(
            [Turn(sequence, i, 0, 1) for i, sequence in enumerate(sequences)],
            max_positions=self._max_positions + 1,
            vocab_size=self._vocab_size,
        )
        return list(self._pools[-1].map(self._score, turns))

    def close(self) -> None:
        """Closes the connections, so that servers abort their requests, and ends the threads."""
        self._router.abort()
        for pool in self._pools:
            pool.shutdown()  # requests that wait fail; `as_completed` would wait for cancelled ones
        self._router.close()

    def _make_room(self, servers: int) -> None:
        """Has threads for so many servers from now on."""
        if servers * self._max_requests > self._most:
            self._most = servers * self._max_requests
            self._pools.append(ThreadPoolExecutor(self._most, thread_name_prefix="vllm"))

    def _score(self, turn: Turn) -> np.ndarray:
        return self._logprobs(turn, check=lambda label: None, model={})

    def _logprobs(
        self, turn: Turn, *, check: Callable[[str], None], model: Mapping[str, Any]
    ) -> np.ndarray:
        """Requests the log-probs of a sequence, f32[T]; NaN for its first token.

        `check` raises if given the label of other weights than intended; `model` names an adapter.
        """
        known = turn.context[: self._max_positions - 1].tolist()
        settings = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,  # of the token itself and no other
            "detokenize": False,
            "ignore_eos": True,
        }
        found = self._router.post(
            {"token_ids": known, "sampling_params": settings, **model},
            read=lambda text: _parse_scores(text, known, check=check),
            about=f"sequence {turn.prompt_index}",
        )
        unknown = [math.nan] * (len(turn.context) - len(known))
        return np.array([math.nan, *found, *unknown], np.float32)


def valid_logprob(logprob: float | None) -> float:
    """Returns a log-prob that a server reported; NaN if it is missing or positive."""
    if logprob is None or not logprob <= _ROUNDING:
        return math.nan
    return min(logprob, 0.0)


def _parse_scores(text: str, tokens: Sequence[int], *, check: Callable[[str], None]) -> list[float]:
    """Returns the log-probs of all tokens but the first."""
    reply = json.loads(text)
    (span,) = reply["choices"][0]["weight_versions"]
    check(span["version"])
    return [
        valid_logprob(entry[str(token)]["logprob"])
        for token, entry in zip(tokens[1:], reply["prompt_logprobs"][1:], strict=True)
    ]
