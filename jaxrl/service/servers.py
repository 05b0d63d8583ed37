"""Samples of a service from vLLM servers: adapters are loaded from their checkpoints, weights with
all parameters are published."""

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxrl.bridge import LearnerIdentity, ParamsSource, SharedMemoryPublisher, VllmServer, headers
from jaxrl.models import Params, lora
from jaxrl.sampling import Completion, OwnTurn, VllmOwnSampler
from jaxrl.service.pool import Base
from jaxrl.service.wire import RefusedError

NO_HEAD = (
    "vLLM servers apply adapters of the layers alone; train those (train_attn, train_mlp), or "
    "serve with the embedded sampler"
)
_LOADED = 32  # adapters that the servers have; more than a batch names


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
        self._versions, self._names = itertools.count(1), itertools.count()
        self._prefix = f"jaxrl-service-{secrets.token_hex(4)}"

    def load(self, weights: Params) -> None:
        """Publishes the base's weights, or others with all parameters."""
        version = next(self._versions)
        specs, wire = self._base.model.specs, self._base.precision.wire
        self._publisher.publish(ParamsSource(weights, specs, dtype=wire), version=version)
        urls = [server.url for server in self._servers if server.connected]
        self._sampler.use_version(version, urls=urls, session=self._learner.session)

    def draw(
        self, turns: Sequence[OwnTurn], adapters: Mapping[str, Params]
    ) -> Iterator[tuple[int, Completion]]:
        """See `VllmOwnSampler.sample_own`; adapters have the names of their checkpoints."""
        while missing := [name for name in adapters if not self._has(name, adapters[name])]:
            self._load_adapters(missing[0], adapters[missing[0]])
        names = [self._loaded[name][1] for name in adapters]
        try:
            # vLLM on a CPU gives tokens of the base the last adapter of their batch.
            for adapted in (False, True):
                places = [i for i, one in enumerate(turns) if (one.adapters is not None) == adapted]
                together = [turns[place] for place in places]
                for i, completion in self._sampler.sample_own(together, names):
                    yield places[i], completion
        except Exception:
            self.forget()  # a server may have restarted
            raise

    def forget(self) -> None:
        """Unloads all adapters; they are loaded again when a request needs them."""
        while self._loaded:
            self._unload(next(iter(self._loaded)))

    def close(self) -> None:
        """Unloads the adapters and lets other learners connect."""
        self.forget()
        self._closing.close()

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
        self._unload(name)
        while len(self._loaded) >= _LOADED:
            self._unload(next(iter(self._loaded)))
        served = f"{self._prefix}-{next(self._names)}"
        for server in self._servers:
            server.load_adapter(served, self._directory(name).resolve())
        self._loaded[name] = adapters, served

    def _unload(self, name: str) -> None:
        if name in self._loaded:
            _, served = self._loaded.pop(name)
            for server in self._servers:
                server.unload_adapter(served)
