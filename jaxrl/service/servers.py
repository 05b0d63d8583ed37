"""Samples of a service from vLLM servers: adapters are loaded from their checkpoints, weights with
all parameters are published."""

import itertools
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from jaxrl.bridge import LearnerIdentity, ParamsSource, SharedMemoryPublisher, VllmServer, headers
from jaxrl.models import Params, lora
from jaxrl.sampling import Completion, OwnTurn, VllmOwnSampler
from jaxrl.service.pool import Base
from jaxrl.service.wire import RefusedError

NO_HEAD = (
    "vLLM servers apply adapters of the layers alone; train those (train_attn, train_mlp), or "
    "serve with the embedded sampler"
)
_LOADED = 32  # adapters that the servers have; more than requests in progress name
_MOMENT = 0.05  # seconds between two looks for further requests


class _Queued(NamedTuple):
    """A turn in progress."""

    number: int
    turn: OwnTurn
    served: str | None  # the name that the servers know its adapters by


class Servers:
    """vLLM servers on this machine, which sample for one service."""

    remote = True

    def __init__(
        self,
        base: Base,
        urls: Sequence[str],
        *,
        key: str | None,
        learner: LearnerIdentity,
        directory: Callable[[str], Path],
    ) -> None:
        """Connects to the servers.

        Args:
          base: the model.
          urls: their addresses.
          key: the key of their requests.
          learner: identity of the service.
          directory: name of adapters -> their directory in PEFT's format.

        Raises:
          RefusedError: if a server has another learner, or computes in another dtype or form of
            operands than `base.precision` says.
        """
        precision, config = base.precision, base.model.config
        self._base, self._directory, self._learner = base, directory, learner
        self._closing = ExitStack()
        self._servers = [VllmServer(url, api_key=key) for url in urls]
        for server in self._servers:
            self._closing.callback(server.disconnect)
        self._publisher = self._closing.enter_context(
            SharedMemoryPublisher(
                self._servers,
                wire=precision.wire,
                sampler=precision.sampler,
                logits=precision.logits,
                blocks=precision.blocks,
                learner=learner,
            )
        )
        self._sampler = VllmOwnSampler(
            urls,
            max_positions=config.max_positions,
            vocab_size=config.vocab_size,
            headers=headers(key),
        )
        self._closing.callback(self._sampler.close)
        self._loaded = OrderedDict[str, tuple[Params, str]]()
        self._leaving = list[str]()
        self._waiting, self._added, self._adapted = deque[_Queued](), 0, False
        self._sent = dict[futures.Future[list[tuple[int, Completion]]], list[_Queued]]()
        self._versions, self._names = itertools.count(1), itertools.count()
        self._prefix = f"jaxrl-service-{secrets.token_hex(4)}"

    def load(self, weights: Params) -> None:
        """Publishes the base's weights, or others with all parameters."""
        version = next(self._versions)
        specs, wire = self._base.model.specs, self._base.precision.wire
        self._publisher.publish(ParamsSource(weights, specs, dtype=wire), version=version)
        urls = [server.url for server in self._servers if server.connected]
        self._sampler.use_version(version, urls=urls, session=self._learner.session)

    def add(self, turns: Sequence[OwnTurn], adapters: Sequence[tuple[str, Params]]) -> int:
        """See `Backend.add`; adapters have the names of their checkpoints."""
        served = dict[int, str]()
        for place in {one.adapters for one in turns if one.adapters is not None}:
            name, params = adapters[place]
            if not self._has(name, params):
                self._load_adapters(name, params)
            served[place] = self._loaded[name][1]
        first = self._added
        for number, one in enumerate(turns, first):
            name = None if one.adapters is None else served[one.adapters]
            self._waiting.append(_Queued(number, one, name))
        self._added += len(turns)
        return first

    def advance(self, most: int) -> list[tuple[int, Completion]]:
        """See `Backend.advance`."""
        self._send()
        moment = _MOMENT if most else 0
        done, _ = futures.wait(self._sent, moment, return_when=futures.FIRST_COMPLETED)
        found = list[tuple[int, Completion]]()
        for future in done:
            sent = self._sent.pop(future)
            found += [(sent[place].number, one) for place, one in future.result()]
        return found

    def drop(self) -> None:
        """See `Backend.drop`. Adapters are loaded again when a request needs them: a server may
        have restarted."""
        for future in self._sent:
            future.cancel()
        self._sent.clear()
        self._waiting.clear()
        self.forget()

    def forget(self) -> None:
        """Unloads all adapters; they are loaded again when a request needs them."""
        while self._loaded:
            self._unload(next(iter(self._loaded)))
        self._unload_unused()

    def close(self) -> None:
        """Unloads the adapters and lets other learners connect."""
        self.forget()
        self._closing.close()

    def _send(self) -> None:
        """Sends turns that wait: of the base or of adapters, since vLLM on a CPU gives tokens of
        the base the last adapter of their batch."""
        if not self._sent and self._waiting:
            self._adapted = self._waiting[0].served is not None
        sent = list[_Queued]()
        while self._waiting and (self._waiting[0].served is not None) == self._adapted:
            sent.append(self._waiting.popleft())
        if not sent:
            return
        names = [*dict.fromkeys(one.served for one in sent if one.served is not None)]
        turns = [
            one.turn._replace(adapters=None if one.served is None else names.index(one.served))
            for one in sent
        ]
        self._sent |= dict.fromkeys(self._sampler.submit(turns, names), sent)

    def _has(self, name: str, adapters: Params) -> bool:
        known = self._loaded.get(name)
        return known is not None and known[0] is adapters

    def _load_adapters(self, name: str, adapters: Params) -> None:
        """Loads adapters under a new name: vLLM keys its prefix cache by names."""
        if not name.startswith("tinker://"):
            raise RefusedError(
                "the servers sample from checkpoints; name the path of save_weights_for_sampler"
            )
        if lora.head_adapter(adapters) is not None:
            raise RefusedError(f"{name} adapts the output layer; {NO_HEAD}")
        if name in self._loaded:
            self._unload(name)
        used = self._used()
        for old, (_, served) in [*self._loaded.items()]:
            if len(self._loaded) >= _LOADED and served not in used:
                self._unload(old)
        self._unload_unused()
        served = f"{self._prefix}-{next(self._names)}"
        for server in self._servers:
            server.load_adapter(served, self._directory(name).resolve())
        self._loaded[name] = adapters, served

    def _unload(self, name: str) -> None:
        """Unloads adapters once no turn in progress needs them."""
        self._leaving.append(self._loaded.pop(name)[1])

    def _unload_unused(self) -> None:
        used = self._used()
        for served in [one for one in self._leaving if one not in used]:
            self._leaving.remove(served)
            for server in self._servers:
                server.unload_adapter(served)

    def _used(self) -> set[str | None]:
        """Returns the served names of adapters that turns in progress need."""
        return {one.served for sent in (self._waiting, *self._sent.values()) for one in sent}
