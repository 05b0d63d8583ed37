"""The vLLM servers of a run, named by its config or started here, and how weights reach them."""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.bridge.adapters import AdapterPublisher, PublishBase
from jaxrl.bridge.base import Server, Timings, WeightPublisher, WeightSource
from jaxrl.bridge.directory import DirectoryPublisher
from jaxrl.bridge.in_vllm import auth
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.kv_cache_size import free_memory, kv_cache_size
from jaxrl.bridge.servers.launch import INSTALL, LocalServer, ServerOptions
from jaxrl.bridge.shared_memory import MEMORY, SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.config.tables import ModelConfig, SamplerConfig, ServerConfig
from jaxrl.core.precision import Precision
from jaxrl.models import huggingface, lora
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.vllm.sampler import VllmSampler


class Batching(Protocol):
    """What of it the embedded sampler needs."""

    @property
    def max_batch(self) -> int:
        """Answers that are decoded at once."""
        ...


class ServingConfig(Protocol):
    """What of a config says how answers are sampled."""

    @property
    def model(self) -> ModelConfig:
        """Where the tokenizer and the model's config lie."""
        ...

    @property
    def sampling(self) -> Batching:
        """How many answers are drawn at once."""
        ...

    @property
    def sampler(self) -> SamplerConfig:
        """Which sampler, and where."""
        ...

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and answer together."""
        ...


class Publish(Protocol):
    """Brings the learner's weights to the sampler."""

    def __call__(self, params: Params, *, version: int) -> dict[str, float]:
        """Returns once everything is sampled from `params`: metrics, seconds of the parts."""
        ...


class Adapters(NamedTuple):
    """Adapters that servers get by themselves.

    Attributes:
      specs: theirs and the model's.
      keep: versions of them that requests may name.
    """

    specs: lora.Adapted
    keep: int


def api_key() -> str | None:
    """What servers are asked with: the environment's JAXRL_API_KEY, which stands in no file of a
    run."""
    return os.environ.get(auth.KEY) or None


@contextmanager
def open_servers(
    config: ServingConfig,
    model: Model,
    *,
    policy: Precision,
    directory: Path,
    note: Callable[[str], None],
    adapters: Adapters | None,
    answers: int,
) -> Iterator[tuple[VllmSampler, Publish]]:
    """A client of the servers of the config, or of one that is started here, and the way to them;
    the arguments and errors are those of `samplers.open_sampler`."""
    # Whoever has an account on this machine could ask a server of ours without one.
    key = api_key() if config.sampler.url else api_key() or secrets.token_hex(16)
    rank = max(config.sampler.max_lora_rank, 0 if adapters is None else adapters.specs.rank)
    with ExitStack() as stack:
        urls = config.sampler.url or (
            stack.enter_context(
                started_server(
                    config.sampler.model_copy(update={"max_lora_rank": rank}),
                    Path(config.model.path),
                    dtype=policy.sampler,
                    # A token is drawn where a sequence is only scored.
                    max_model_len=min(config.longest_sequence + 1, model.config.max_positions),
                    log=directory / "vllm.log",
                    note=note,
                    key=key,
                    answers=answers,
                )
            ).url,
        )
        client = VllmSampler(
            urls,
            max_positions=model.config.max_positions,
            vocab_size=model.config.vocab_size,
            max_requests=config.sampler.max_requests,
            timeout=config.sampler.timeout,
            headers=auth.headers(key),
        )
        stack.callback(client.close)
        servers = [VllmServer(url, timeout=config.sampler.timeout, api_key=key) for url in urls]
        if adapters is None:
            bring = _bring_whole(
                stack.enter_context(_publisher(config, servers, policy=policy)), model, policy
            )
        else:
            root = stack.enter_context(_adapter_root(config.sampler))
            bring = AdapterPublisher(
                servers,
                root,
                specs=adapters.specs,
                base=config.model.path,
                wire=policy.wire,
                publish_base=_bring_base(config, policy),
                keep=adapters.keep,
            ).publish

        yield client, _Published(bring, servers, client=client, note=note)


class _Published:
    """Brings weights to servers, and tells the client which of them have them."""

    def __init__(
        self,
        bring: "_Bring",
        servers: Sequence[VllmServer],
        *,
        client: VllmSampler,
        note: Callable[[str], None],
    ) -> None:
        self._bring, self._servers, self._client, self._note = bring, servers, client, note
        self._serving = {server.url for server in servers}  # until one is found missing

    def __call__(self, params: Any, *, version: int) -> dict[str, float]:
        before = self._serving
        adapter, timings = self._bring(params, version=version)
        self._serving = {server.url for server in self._servers if server.connected}
        for server in self._servers:
            if server.url in before - self._serving:
                self._note(
                    f"{server.url} is done without, the other servers go on and it is tried "
                    f"again: {server.last_error}"
                )
        for url in sorted(self._serving - before):
            self._note(f"{url} is back and serves version {version}")
        self._client.use_version(version, urls=sorted(self._serving), adapter=adapter)
        seconds = {f"time/publish/{name}": s for name, s in timings._asdict().items()}
        return seconds | {"sampler/servers": float(len(self._serving))}


class _Bring(Protocol):
    """Brings parameters to all servers: the adapter that requests must name, and seconds."""

    def __call__(self, params: Any, *, version: int) -> tuple[str | None, Timings]: ...


def _bring_whole(publisher: WeightPublisher, model: Model, policy: Precision) -> _Bring:
    def bring(params: Any, *, version: int) -> tuple[None, Timings]:
        source = ParamsSource(lora.merge(params), model.specs, dtype=policy.wire)
        return None, publisher.publish(source, version=version)

    return bring


def _bring_base(config: ServingConfig, policy: Precision) -> PublishBase:
    def bring(servers: Sequence[Server], source: WeightSource, version: int) -> None:
        # Once in a run: what it takes to publish whole weights is not kept.
        with _publisher(config, servers, policy=policy) as publisher:
            publisher.publish(source, version=version)

    return bring


@contextmanager
def _adapter_root(config: SamplerConfig) -> Iterator[Path]:
    if config.directory is not None:
        Path(config.directory).mkdir(parents=True, exist_ok=True)
        yield Path(config.directory)
        return
    with TemporaryDirectory(prefix=f"jaxrl-{os.getpid()}-", dir=MEMORY) as root:
        yield Path(root)


@contextmanager
def _publisher(
    config: ServingConfig, servers: Sequence[Server], *, policy: Precision
) -> Iterator[WeightPublisher]:
    c = config.sampler
    if c.directory is not None:
        yield DirectoryPublisher(
            servers,
            Path(c.directory),
            model_dir=Path(config.model.path),
            wire=policy.wire,
            sampler=policy.sampler,
            in_flight=c.in_flight,
        )
        return
    with SharedMemoryPublisher(
        servers, wire=policy.wire, sampler=policy.sampler, in_flight=c.in_flight
    ) as publisher:
        yield publisher


@contextmanager
def started_server(
    config: ServerConfig,
    model_dir: Path,
    *,
    dtype: np.dtype,
    max_model_len: int | None,
    log: Path,
    note: Callable[[str], None],
    host: str = "127.0.0.1",
    key: str | None = None,
    answers: int = 1,
) -> Iterator[LocalServer]:
    """A vLLM server that is ready, and ends with the block.

    Raises:
      ValueError: for a host that others can reach, without a key; for memory that does not hold the
        keys and values of one answer.
      FileNotFoundError: if its environment does not exist.
      ServerFailedError: if it does not start, or if the block fails because it has ended; the
        message has what it printed last.
    """
    python = Path(config.python)
    if not python.exists():
        raise FileNotFoundError(f"{python} does not exist; {INSTALL[config.device]}")
    options = ServerOptions(
        python=python.absolute(),
        dtype=dtype.name,
        max_model_len=max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        device=config.device,
        host=host,
        port=config.port,
        api_key=key,
        max_lora_rank=config.max_lora_rank,
        arguments=config.arguments,
    )
    cache = kv_cache_size(
        options,
        key="sampler." * isinstance(config, SamplerConfig) + "kv_cache_bytes",
        model=huggingface.load_config(model_dir),
        completions=answers,
        free=free_memory(),
    )
    if cache.note is not None:
        note(cache.note)
    options = dataclasses.replace(options, kv_cache_bytes=cache.nbytes)
    reported = 0.0

    def progress(seconds: float) -> None:
        nonlocal reported
        if seconds >= reported:
            note(f"vLLM is starting, {seconds:.0f} s; it prints to {log}")
            reported += 10

    with LocalServer(model_dir, options, log=log) as server:
        server.wait(progress)
        note(f"vLLM serves {model_dir} in {dtype.name} at {server.url}")
        try:
            yield server
        except Exception:
            server.check()
            raise
