"""Publishing through a directory that learner and servers share: each version a HF checkpoint."""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from jaxrl.bridge import payload, safetensors_file
from jaxrl.bridge.base import InFlight, Server, Timings, WeightSource
from jaxrl.bridge.swap import switch

# Beside the weights a checkpoint has its configuration and its tokenizer.
_NOT_COPIED = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
_MAX_FILE_BYTES = 5 * 10**9


def export(
    source: WeightSource,
    directory: Path,
    *,
    version: int,
    model_dir: Path,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Writes a checkpoint directory with a manifest; it appears whole or not at all.

    Args:
      source: the weights.
      directory: what to make; its parent must exist.
      version: for the manifest.
      model_dir: the checkpoint that configuration and tokenizer are copied from.
      max_file_bytes: a safetensors file is not larger, unless one tensor is.

    Raises:
      FileExistsError: if `directory` exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; a published version is never overwritten")
    draft = directory.with_name(f".{directory.name}.{os.getpid()}")
    draft.mkdir()
    try:
        files = safetensors_file.plan(source.specs(), max_file_bytes=max_file_bytes)
        if len(files) > 1:
            (draft / "model.safetensors.index.json").write_text(safetensors_file.index(files))
        for item in sorted(model_dir.iterdir()):
            if item.is_file() and not item.name.endswith((*_NOT_COPIED, "manifest.json")):
                shutil.copyfile(item, draft / item.name)
        with ExitStack() as stack:
            handles = {
                file.name: stack.enter_context((draft / file.name).open("wb")) for file in files
            }

            def put(file: str, offset: int, data: np.ndarray) -> None:
                os.pwrite(handles[file].fileno(), data.data, offset)

            written = payload.write(source, files, put, version=version)
            for handle in handles.values():
                os.fsync(handle.fileno())
        payload.write_manifest(draft, written)
        draft.rename(directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class DirectoryPublisher:
    """A `WeightPublisher` through a shared file system.

    Version n becomes the checkpoint `root/version-n`, which any program can load; the last `keep`
    versions that were published stay. A run that goes on publishes some versions again: what lies
    there of them is replaced.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        root: Path,
        *,
        model_dir: Path,
        wire: np.dtype,
        sampler: np.dtype,
        in_flight: InFlight = "keep",
        keep: int = 2,
    ) -> None:
        """Connects; servers must see the directory under the same path.

        Args:
          servers: who is told.
          root: made if it is missing.
          model_dir: the checkpoint that configuration and tokenizer are copied from.
          wire: the precision policy's role.
          sampler: likewise.
          in_flight: what becomes of requests in flight.
          keep: at least 2, so that no version vanishes under a server that still reads it.

        Raises:
          RefusedError: if a server computes in another dtype than `sampler`.
        """
        if keep < 2:
            raise ValueError(f"keep={keep}: two versions must stay, one may still be read")
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._model_dir = root, model_dir
        self._servers = servers
        self._in_flight: InFlight = in_flight
        self._keep = keep
        earlier = root.glob("version-*")
        self._published = sorted(earlier, key=lambda path: path.stat().st_mtime)
        for server in servers:
            server.connect(root=str(root.resolve()), wire=wire.name, sampler=sampler.name)

    def publish(self, source: WeightSource, *, version: int) -> Timings:
        """See `WeightPublisher.publish`."""
        start = time.perf_counter()
        directory = self._root / f"version-{version}"
        if directory in self._published:
            self._published.remove(directory)
            shutil.rmtree(directory)
        export(source, directory, version=version, model_dir=self._model_dir)
        self._published.append(directory)
        written = time.perf_counter() - start
        timings = switch(self._servers, directory.name, version=version, in_flight=self._in_flight)
        while len(self._published) > self._keep:
            shutil.rmtree(self._published.pop(0))
        return timings._replace(write=written)
