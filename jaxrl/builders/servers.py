"""Starts vLLM servers on this machine as a config describes them."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.bridge import (
    INSTALL,
    LocalServer,
    ServerFailedError,
    ServerOptions,
    free_memory,
    kv_cache_size,
    server_key,
)
from jaxrl.config.sampler import SamplerConfig, ServerConfig
from jaxrl.huggingface import Checkpoint

_NOTE_SECONDS = 10  # between two lines about a server that is starting


class StartingServer(NamedTuple):
    """A server that may not be ready."""

    server: LocalServer  # its process
    what: str  # the model and the dtype that it will serve
    log: Path  # file with its output
    note: Callable[[str], None]  # shows a line to the user

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> LocalServer:
        """Waits until the server is ready and returns it; often calls `meanwhile` until then.

        Raises:
          ServerFailedError: if it ends, is not ready in time or fails its first request; the
            message contains the end of its output.
          Exception: any error of `meanwhile`.
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
    checkpoint: Checkpoint,
    *,
    dtype: np.dtype,
    log: Path,
    note: Callable[[str], None],
    completions: int = 1,
    memory: int | None = None,
    **further: Any,
) -> Iterator[StartingServer]:
    """Starts a vLLM server, without waiting, and stops it at the end of the block.

    Args:
      config: the interpreter, the device, and vLLM's arguments.
      checkpoint: the model that it serves.
      dtype: of weights, activations and KV cache.
      log: file for its output.
      note: shows a line to the user.
      completions: requested at the same time; the KV cache on a CPU is sized for them.
      memory: bytes on a CPU that the server may take; None for all that is free.
      further: more fields of `ServerOptions`; `api_key` is by default the `server_key`.

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
    model = checkpoint.config
    if checkpoint.is_quantised:
        raise ValueError(
            f"{checkpoint.directory} is quantised (quantization_config in config.json), and vLLM "
            "would refuse a learner's weights, which are not; write a copy in bf16, see "
            "docs/models.md, and name it in model.path"
        )
    options = ServerOptions(
        python=python.absolute(),
        dtype=dtype.name,
        kv_cache_bytes=config.kv_cache_bytes,
        device=config.device,
        arguments=config.vllm_args,
        **further,
    )
    options = dataclasses.replace(options, api_key=options.api_key or server_key(options.host))
    nbytes, remark = kv_cache_size(
        options,
        key="sampler." * isinstance(config, SamplerConfig) + "kv_cache_bytes",
        model=model,
        completions=completions,
        free=free_memory() if memory is None else memory,
    )
    if remark is not None:
        note(remark)
    options = dataclasses.replace(options, kv_cache_bytes=nbytes)
    what = f"{checkpoint.directory} in {dtype.name}"
    with LocalServer(checkpoint.directory, options, log=log) as server:
        try:
            yield StartingServer(server, what, log, note)
        except ServerFailedError:
            raise
        except Exception:
            server.check()
            raise
