"""Starts vLLM servers on this machine as a config describes them."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.bridge.servers.kv_cache_size import free_memory, kv_cache_size
from jaxrl.bridge.servers.launch import INSTALL, LocalServer, ServerFailedError, ServerOptions
from jaxrl.builders.api_key import server_key
from jaxrl.config.sampler import SamplerConfig, ServerConfig
from jaxrl.models import huggingface

_NOTE_SECONDS = 10  # between two lines about a server that is starting


class Workload(NamedTuple):
    """The load of a server."""

    dtype: np.dtype  # of weights, activations and KV cache
    # Maximum length of a prompt with its completion; None for the model's own limit.
    max_model_len: int | None = None
    # Completions that are requested at the same time; the KV cache on a CPU is sized for them.
    completions: int = 1
    max_lora_rank: int = 0  # largest rank of the adapters that it can load; 0 for none
    record_experts: bool = False  # completions name the experts of each token
    memory: int | None = None  # bytes on a CPU that the server may take; None for all that is free


class Address(NamedTuple):
    """The way to a server."""

    host: str = "127.0.0.1"  # anything but loopback can be reached by others, and needs a given key
    port: int = 0  # 0 takes a free one
    # The key that every request must carry; None for the user's own, see `server_key`.
    api_key: str | None = None
    # Directory of this host's agent, which fetches weights from a store, if there is one.
    agent: Path | None = None


_LOOPBACK = Address()


class StartingServer(NamedTuple):
    """A server that may not be ready."""

    server: LocalServer  # its process
    what: str  # the model and the dtype that it will serve
    log: Path  # file with its output
    note: Callable[[str], None]  # shows a line to the user

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> LocalServer:
        """Waits until the server is ready, and returns it; calls `meanwhile` several times a
        second.

        Raises:
          ServerFailedError: if it ends, is not ready in time or fails its first request; the
            message contains the end of its output. Also what `meanwhile` raises.
        """
        reported = 0.0

        def progress(seconds: float) -> None:
            nonlocal reported
            if seconds >= reported:
                self.note(f"vLLM is starting ({seconds:.0f} s); its output is in {self.log}")
                reported += _NOTE_SECONDS
            meanwhile()

        self.server.wait(progress)
        self.note(f"vLLM serves {self.what} at {self.server.url}")
        return self.server


@contextmanager
def starting_server(
    config: ServerConfig,
    model_dir: Path,
    *,
    work: Workload,
    log: Path,
    note: Callable[[str], None],
    address: Address = _LOOPBACK,
) -> Iterator[StartingServer]:
    """Starts a vLLM server, without waiting, and stops it at the end of the block.

    Its output goes to `log`; `note` shows a line to the user.

    Raises:
      ValueError: for a host that others can reach without a key, a key that cannot be read or
        made, a KV cache that does not hold one completion, or a quantised model.
      FileNotFoundError: if the Python interpreter does not exist.
      ServerFailedError: if the port is in use, or the block fails because the server ended; the
        message then contains the end of its output.
    """
    python = Path(config.python)
    if not python.exists():
        raise FileNotFoundError(f"{python} does not exist; {INSTALL[config.device]}")
    model = huggingface.load_config(model_dir)
    if huggingface.is_quantised(model_dir):
        raise ValueError(
            f"{model_dir} is quantised (quantization_config in config.json); vLLM would keep it so "
            "and refuse the weights that a learner publishes; write a copy in bf16, see "
            "docs/models.md, and name it in model.path"
        )
    options = ServerOptions(
        python=python.absolute(),
        dtype=work.dtype.name,
        max_model_len=work.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        device=config.device,
        host=address.host,
        port=address.port,
        api_key=address.api_key or server_key(address.host),
        max_lora_rank=work.max_lora_rank,
        record_experts=work.record_experts,
        agent=address.agent,
        arguments=config.vllm_args,
    )
    cache = kv_cache_size(
        options,
        key="sampler." * isinstance(config, SamplerConfig) + "kv_cache_bytes",
        model=model,
        completions=work.completions,
        free=free_memory() if work.memory is None else work.memory,
    )
    if cache.note is not None:
        note(cache.note)
    options = dataclasses.replace(options, kv_cache_bytes=cache.nbytes)
    what = f"{model_dir} in {work.dtype.name}"
    with LocalServer(model_dir, options, log=log) as server:
        try:
            yield StartingServer(server, what, log, note)
        except ServerFailedError:
            raise
        except Exception:
            server.check()
            raise
