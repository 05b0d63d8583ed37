"""An episode as its agent sees it: requests that wait for turns, and rewards."""

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

from jaxrl.environments.gateway.dialect import TurnAnswer, TurnRefusedError, TurnRequest


class Endpoint(NamedTuple):
    """The address of an episode, for its agent.

    Attributes:
      url: of the episode, as Anthropic's clients take it.
      openai_url: the same as OpenAI's clients take it, with `/v1`.
      key: names the episode; a client may send it as its API key to an address without it.
      model: the name of the policy.
    """

    url: str
    openai_url: str
    key: str
    model: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a process that official clients read, and jaxrl's own."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "JAXRL_REWARD_URL": f"{self.url}/reward",
            "JAXRL_MODEL": self.model,
        }


class Waiting(NamedTuple):
    """A request and the answer that its client waits for."""

    request: TurnRequest
    answer: "Future[TurnAnswer]"

    def reply(self, answer: TurnAnswer) -> None:
        """Answers, unless the client is gone or has an answer."""
        with contextlib.suppress(InvalidStateError):
            self.answer.set_result(answer)

    def refuse(self, error: TurnRefusedError) -> None:
        """Answers with an error, as `reply`."""
        with contextlib.suppress(InvalidStateError):
            self.answer.set_exception(error)


class Session:
    """One episode's requests, which wait for each other, and its rewards. Threads share it."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Begins an episode."""
        self.endpoint = endpoint
        self._queue = queue.SimpleQueue[Waiting | None]()
        self._lock, self._reward, self._metrics = threading.Lock(), 0.0, Counter[str]()
        self._open, self._ended, self._error = dict[Future[TurnAnswer], Waiting](), False, ""

    def ask(self, request: TurnRequest) -> "Future[TurnAnswer]":
        """Queues a request; its answer is an error after the end of the episode."""
        waiting = Waiting(request, Future())
        with self._lock:
            if self._ended:
                raise TurnRefusedError("ended", "the episode has ended; no more turns are sampled")
            self._open[waiting.answer] = waiting
        waiting.answer.add_done_callback(self._forget)
        self._queue.put(waiting)
        return waiting.answer

    def next(self) -> Waiting | None:
        """Waits for the next request; None at the end of the episode.

        Raises:
          RuntimeError: if the agent failed.
        """
        while (waiting := self._queue.get()) is not None:
            if not waiting.answer.done():  # its client is still there
                return waiting
        if self._error:
            raise RuntimeError(self._error)
        return None

    def add(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """Adds a reward to the episode."""
        with self._lock:
            self._reward += reward
            self._metrics.update(metrics or {})

    def take(self) -> tuple[float, dict[str, Any]]:
        """Returns the reward and the metrics that were added since the last call."""
        with self._lock:
            taken = self._reward, dict(self._metrics)
            self._reward = 0.0
            self._metrics.clear()
        return taken

    def end(self, error: str = "") -> None:
        """Ends the episode, maybe as a failure of its agent; requests that wait get an error."""
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, error
            left = list(self._open.values())
        self._queue.put(None)
        for waiting in left:
            waiting.refuse(TurnRefusedError("ended", "the episode has ended before this turn"))

    def _forget(self, answer: "Future[TurnAnswer]") -> None:
        with self._lock:
            self._open.pop(answer, None)
