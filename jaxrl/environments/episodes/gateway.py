"""Episodes of agents that request turns at the gateway, as if it were a model's API."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.conversations import Conversations, Place, Templates
from jaxrl.environments.gateway.dialect import TurnRefusedError
from jaxrl.environments.gateway.session import Session, Waiting

if TYPE_CHECKING:  # the server's packages are optional
    from jaxrl.environments.gateway.server import Gateway

Start = Callable[[Session, Example], Callable[[], None]]
"""Starts the agent of an episode, which ends its session; returns the function that stops it."""


class GatewayEpisode:
    """An `Environment`: one episode of an agent. Its requests are answered one after the other."""

    def __init__(
        self, templates: Templates, gateway: "Gateway", start: Start, *, limits: EpisodeLimits
    ) -> None:
        """Creates one episode; `start` starts its agent."""
        self._gateway, self._start = gateway, start
        self._conversations = Conversations(templates, limits)
        self._session: Session | None = None
        self._stop: Callable[[], None] | None = None
        self._waiting: tuple[Waiting, Place] | None = None

    async def reset(self, example: Example) -> Step:
        """Starts the agent and returns its first request; raises RuntimeError if it has none."""
        session = self._session = self._gateway.open()
        self._stop = self._start(session, example)
        step = self._next(session)
        if step.done:
            raise RuntimeError("the agent ended without a request for a turn")
        return step

    async def step(self, completion: np.ndarray) -> Step:
        """Answers the request with a turn, and returns the next one, or the end of the agent."""
        assert self._session is not None
        assert self._waiting is not None
        waiting, place = self._waiting
        waiting.reply(self._conversations.answer(place, completion))
        step = self._next(self._session)
        reward, metrics = self._session.take()
        return step._replace(reward=reward, metrics={**metrics, **step.metrics})

    def close(self) -> None:
        """Ends the session and stops the agent."""
        if self._session is not None:
            self._gateway.close(self._session)
        if self._stop is not None:
            self._stop()

    def _next(self, session: Session) -> Step:
        """Waits for a request that can be asked, or the end; raises RuntimeError if the agent
        failed."""
        while (waiting := session.next()) is not None:
            try:
                place = self._conversations.place(waiting.request)
            except TurnRefusedError as refused:
                waiting.refuse(refused)
                continue
            self._waiting = waiting, place
            return self._conversations.step(place)
        return Step(done=True)
