"""Log-probs of given tokens from vLLM servers: under the policy's weights, or a teacher's."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl.sampling.base import Turn, check_turns
from jaxrl.sampling.vllm.router import Router

PATH = "/inference/v1/generate"
_ROUNDING = 1e-4  # a log-prob above 0 by less is rounded to 0; by more it is invalid


class VllmTeacher:
    """Asks vLLM servers that hold a fixed model for its log-probs of given tokens."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_positions: int,
        vocab_size: int,
        max_requests: int,
        timeout: float,
        headers: Mapping[str, str],
    ) -> None:
        """Makes the client without connecting; arguments and errors are those of `VllmSampler`."""
        self._max_positions, self._vocab_size = max_positions, vocab_size
        self._router = Router(urls, max_requests=max_requests, timeout=timeout, headers=headers)
        self._pool = ThreadPoolExecutor(len(urls) * max_requests, thread_name_prefix="teacher")

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes log-probs as `VllmSampler.score`, of whatever weights the servers hold.

        Raises:
          ValueError: if a sequence is empty, too long or outside the vocabulary.
          SamplerError: if a server does not answer after several attempts.
        """
        turns = scored_turns(
            sequences, max_positions=self._max_positions, vocab_size=self._vocab_size
        )
        return list(self._pool.map(self._score, turns))

    def close(self) -> None:
        """Closes the connections and ends the threads."""
        self._router.abort()
        self._pool.shutdown(cancel_futures=True)
        self._router.close()

    def _score(self, turn: Turn) -> np.ndarray:
        return score_turn(
            self._router, turn, max_positions=self._max_positions, check=lambda label: None
        )


def scored_turns(
    sequences: Sequence[np.ndarray], *, max_positions: int, vocab_size: int
) -> Sequence[Turn]:
    """Returns a turn for each sequence of token ids; raises ValueError as `check_turns`."""
    turns = [Turn(sequence, i, 0, 1) for i, sequence in enumerate(sequences)]
    return check_turns(turns, max_positions=max_positions + 1, vocab_size=vocab_size)


def score_turn(
    router: Router,
    turn: Turn,
    *,
    max_positions: int,
    check: Callable[[str], None],
    model: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Requests the log-probs of a sequence, f32[T]; NaN for its first token.

    `check` raises for a name of weights that must not score; `model` names an adapter.
    """
    known = turn.context[: max_positions - 1].tolist()
    settings = {
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,  # of the token itself and no other
        "detokenize": False,
        "ignore_eos": True,
    }
    found = router.post(
        PATH,
        json.dumps({"token_ids": known, "sampling_params": settings} | dict(model or {})),
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
