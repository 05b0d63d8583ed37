"""An endpoint of OpenAI's and Anthropic's dialects in front of the service's weights.

A session, named in the address, records the tokens of its turns as they were sampled.
"""

import asyncio
import functools
import math
import secrets
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.environments import (
    Chat,
    Conversations,
    EpisodeLimits,
    Place,
    Templates,
    TurnAnswer,
    TurnRefusedError,
    TurnRequest,
)
from jaxrl.environments.gateway.server import Ask, gateway_route, read_reward, sent_key, turn_routes
from jaxrl.sampling import Completion
from jaxrl.service.routing import MissingError, Service, owned
from jaxrl.service.sampling import BASE, Request as Drawing
from jaxrl.service.wire import RefusedError

_KEPT = 4096  # sessions


class Turn(NamedTuple):
    """A turn of the policy.

    Attributes:
      after: the turn before it, -1 for none.
      read: i32[N], tokens that the policy read after that turn.
      tokens: i32[C], its own.
      logprobs: f32[C], of its tokens.
      model: the weights that sampled it, as the request named them.
      version: those weights themselves: of a training client, `MODEL@N` after its request N.
    """

    after: int
    read: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    model: str
    version: str


class Recorded:
    """A session: conversations, and the reward that was posted."""

    def __init__(self, conversations: Conversations) -> None:
        """Begins without turns."""
        self.conversations, self.turns = conversations, list[Turn]()
        self.reward, self.metrics = 0.0, dict[str, float]()
        self._lock = threading.Lock()

    def place(self, request: TurnRequest) -> tuple[Place, np.ndarray]:
        """Returns the place of a request's turn, and the tokens before it, i32[N]."""
        with self._lock:
            place = self.conversations.place(request)
            return place, np.concatenate([self.tokens(place.after), place.tokens])

    def add(self, place: Place, sample: Completion, version: str) -> TurnAnswer:
        """Records a turn that the weights `version` sampled."""
        with self._lock:
            found = self.conversations.answer(place, sample.tokens)
            read, model = np.asarray(place.tokens, np.int32), place.request.model
            logprobs = sample.logprobs
            self.turns.append(Turn(place.after, read, sample.tokens, logprobs, model, version))
            return found._replace(truncated=sample.finish_reason == "length")

    def chain(self, last: int) -> list[int]:
        """Returns the turns of a sequence, up to one of them."""
        found = []
        while last >= 0:
            found.append(last)
            last = self.turns[last].after
        return found[::-1]

    def tokens(self, last: int) -> np.ndarray:
        """Returns the tokens of a sequence up to the end of a turn, i32[N]."""
        turns = [self.turns[place] for place in self.chain(last)]
        parts = [part for turn in turns for part in (turn.read, turn.tokens)]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def sequences(self) -> list[dict[str, Any]]:
        """Returns every sequence that no turn continues, once for each model that sampled in it:
        its tokens, their log-probs, a mask of those that the model sampled, and its turns. Each
        turn is marked in one sequence, its first."""
        turns = list(self.turns)  # others may be added meanwhile
        inner, told = {turn.after for turn in turns}, set[int]()
        found = []
        for last in range(len(turns)):
            if last in inner:
                continue
            chain = self.chain(last)
            new = [place for place in chain if place not in told]
            told.update(new)
            for model in dict.fromkeys(turns[place].model for place in new):
                own = {place for place in new if turns[place].model == model}
                found.append(
                    {"model": model} | self._marked(chain[: chain.index(max(own)) + 1], own)
                )
        return found

    def _marked(self, chain: list[int], own: set[int]) -> dict[str, Any]:
        """Returns a sequence in which the turns `own` are marked."""
        logprobs, mask, spans = list[float](), list[int](), list[dict[str, Any]]()
        for place in chain:
            turn, size = self.turns[place], len(self.turns[place].tokens)
            logprobs += [0.0] * len(turn.read)
            mask += [0] * len(turn.read)
            if place in own:
                spans.append({"begin": len(mask), "end": len(mask) + size, "version": turn.version})
            logprobs += turn.logprobs.tolist() if place in own else [0.0] * size
            mask += [int(place in own)] * size
        tokens = self.tokens(chain[-1]).tolist()
        return {"tokens": tokens, "logprobs": logprobs, "mask": mask, "turns": spans}


class Gateway:
    """The sessions of a service's clients; they end with the server."""

    def __init__(self, service: Service, tokenizer: Any) -> None:
        """Prepares the chat template of the model's tokenizer."""
        self._service, engine = service, service.engine
        self._limits = engine.limits
        self._sessions = OrderedDict[tuple[str, str], Recorded]()
        self._templates = Templates(Chat(tokenizer)) if tokenizer.chat_template else None

    def routes(self) -> list[Route]:
        """Lists the routes, with and without a session in the address."""
        found = []
        for prefix in ("", "/s/{session}"):
            found += turn_routes(prefix, self._open)
            found.append(gateway_route(f"{prefix}/v1/models", self._models, method="GET"))
        found.append(gateway_route("/s/{session}/reward", self._reward))
        found.append(gateway_route("/s/{session}", self._fetch, method="GET"))
        found.append(gateway_route("/s/{session}", self._forget, method="DELETE"))
        return found

    def _owner(self, request: Request) -> str:
        owner = self._service.keys.get(sent_key(request))
        if owner is None:
            raise TurnRefusedError("key", "the key is missing or unknown; send the server's")
        return owner

    def _open(self, request: Request) -> Ask:
        owner = self._owner(request)
        session = self._session(owner, request.path_params.get("session"))

        return functools.partial(self._turn, session, owner=owner)

    def _session(self, owner: str, name: str | None) -> Recorded:
        """Returns a session, which begins with its first request; without a name, one that nobody
        can fetch."""
        if self._templates is None:
            raise TurnRefusedError("invalid", "the model's tokenizer has no chat template")
        limits = EpisodeLimits(2**31, 2**31, 2**31, 0.0, self._limits.vocab_size)
        made = Recorded(Conversations(self._templates, limits))
        if name is None:
            return made
        found = self._sessions.setdefault((owner, name), made)
        self._sessions.move_to_end((owner, name))
        while len(self._sessions) > _KEPT:
            self._sessions.popitem(last=False)
        return found

    async def _turn(self, session: Recorded, asked: TurnRequest, *, owner: str) -> TurnAnswer:
        engine = self._service.engine
        weights = await run_in_threadpool(self._weights, asked.model, owner)
        place, tokens = await run_in_threadpool(session.place, asked)
        room = self._limits.max_positions - len(tokens)
        if room < 1:
            raise TurnRefusedError(
                "length",
                f"the conversation has {len(tokens)} tokens; the model takes "
                f"{self._limits.max_positions} with the turn",
            )
        wanted = asked.sampling
        drawing = Drawing(
            weights=weights,
            prompt=tokens,
            count=1,
            max_tokens=min(asked.max_tokens or room, room),
            temperature=1.0 if wanted.temperature is None else float(wanted.temperature),
            top_p=float(wanted.top_p or 1.0),
            top_k=min(wanted.top_k or 0, self._limits.vocab_size),
            stop=tuple(asked.stop) or None,
            seed=secrets.randbelow(2**31) if wanted.seed is None else wanted.seed,
            ends=True,
        )
        try:
            drawing = engine.with_weights(drawing, weights)
            answer = await asyncio.wrap_future(engine.draw(drawing))
        except RefusedError as error:
            raise TurnRefusedError("invalid", str(error)) from error
        version = answer.weights or self._service.name
        return await run_in_threadpool(session.add, place, answer.samples[0], version)

    def _weights(self, model: str, owner: str) -> str:
        """Returns the weights of a model's name, as `Engine.with_weights` takes them."""
        service = self._service
        try:
            if model in (service.name, str(service.directory)):
                return BASE
            if model.startswith("tinker://"):
                row = service.engine.checkpoints.readable(model, owner)
                if row["kind"] != "training":
                    return service.engine.checkpoints.lasting(model)
            elif model:
                owned(service, "models", key=model, owner=owner)
                service.engine.open_line(model)
                return model
        except (MissingError, RefusedError):
            pass
        raise TurnRefusedError(
            "model",
            f"the model {model!r:.200} is not here; name {service.name!r}, the path of "
            "save_weights_for_sampler, or the model_id of a training client",
        )

    async def _models(self, request: Request) -> Response:
        self._owner(request)
        one = {"id": self._service.name, "object": "model", "created": 0, "owned_by": "jaxrl"}
        return JSONResponse({"object": "list", "data": [one | {"type": "model"}]})

    def _known(self, request: Request) -> tuple[tuple[str, str], Recorded]:
        key = self._owner(request), request.path_params["session"]
        if key not in self._sessions:
            raise TurnRefusedError("model", f"there is no session {key[1]!r:.80} of this key")
        return key, self._sessions[key]

    async def _reward(self, request: Request) -> Response:
        _, session = self._known(request)
        reward, metrics = await read_reward(request)
        if not all(map(math.isfinite, (session.reward + reward, *metrics.values()))):
            # It could be told to nobody: JSON has no such number.
            raise TurnRefusedError(
                "invalid", f"reward {reward} or metrics {metrics}: post finite numbers"
            )
        session.reward += reward
        for name, value in metrics.items():
            session.metrics[name] = session.metrics.get(name, 0.0) + value
        return JSONResponse({"reward": session.reward})

    async def _fetch(self, request: Request) -> Response:
        """Returns a session as sequences, and as Datums whose advantage is the query's, by default
        the reward."""
        _, session = self._known(request)
        try:
            advantage = float(given := request.query_params.get("advantage", session.reward))
        except ValueError as error:
            raise TurnRefusedError("invalid", f"advantage must be a number: {error}") from error
        if not math.isfinite(advantage):
            raise TurnRefusedError("invalid", f"advantage = {given}: it must be a finite number")
        sequences = session.sequences()
        return JSONResponse(
            {
                "reward": session.reward,
                "metrics": session.metrics,
                "sequences": sequences,
                "datums": [_datum(one, advantage) for one in sequences],
            }
        )

    async def _forget(self, request: Request) -> Response:
        key, _ = self._known(request)
        del self._sessions[key]
        return Response(status_code=204)


def _datum(sequence: dict[str, Any], advantage: float) -> dict[str, Any]:
    """Returns the arguments of a Datum for `importance_sampling` or `ppo`; the model's input as
    token ids."""
    mask = np.array(sequence["mask"][1:], np.float32)
    return {
        "model_input": sequence["tokens"][:-1],
        "loss_fn_inputs": {
            "target_tokens": sequence["tokens"][1:],
            "logprobs": sequence["logprobs"][1:],
            "advantages": (advantage * mask).tolist(),
        },
    }
