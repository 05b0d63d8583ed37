"""Publishing through a shared directory; each version is a Hugging Face checkpoint."""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from jaxrl.bridge import payload, safetensors_file
from jaxrl.bridge.base import InFlight, Server, Timings, WeightSource
from jaxrl.bridge.swap import swap_weights

# Weights of the model's checkpoint; all its other files are copied.
_NOT_COPIED = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
_MAX_FILE_BYTES = 5 * 10**9


def write_checkpoint(
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
      directory: the new directory; its parent must exist.
      version: recorded in the manifest.
      model_dir: the checkpoint to copy configuration and tokenizer from.
      max_file_bytes: limit for a safetensors file, exceeded only by a single larger tensor.

    Raises:
      FileExistsError: if `directory` exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; a published version is never overwritten")
    draft = directory.with_name(f".{directory.name}.{os.getpid()}")
    draft.mkdir()
    try:
        files = safetensors_file.plan_files(source.specs(), max_file_bytes=max_file_bytes)
        if len(files) > 1:
            (draft / "model.safetensors.index.json").write_text(safetensors_file.index_json(files))
        for item in sorted(model_dir.iterdir()):
            if item.is_file() and not item.name.endswith((*_NOT_COPIED, "manifest.json")):
                shutil.copyfile(item, draft / item.name)
        with ExitStack() as stack:
            handles = {
                file.name: stack.enter_context((draft / file.name).open("wb")) for file in files
            }

            def write_bytes(file: str, offset: int, data: np.ndarray) -> None:
                os.pwrite(handles[file].fileno(), data.data, offset)

            written = payload.write_tensors(source, files, write_bytes, version=version)
            for handle in handles.values():
                os.fsync(handle.fileno())
        payload.write_manifest(draft, written)
        draft.rename(directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class DirectoryPublisher:
    """A `WeightPublisher` through a shared file system.

    Version n becomes the checkpoint `root/version-n`, which any program can load. The last `keep`
    published versions are kept. A resumed run publishes some versions again and replaces them.
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
        """Connects the servers, which must see the directory under the same path.

        Args:
          servers: the servers to update.
          root: created if missing.
          model_dir: the checkpoint to copy configuration and tokenizer from.
          wire: dtype of the published tensors.
          sampler: dtype that the servers compute in.
          in_flight: what happens to requests in flight.
          keep: versions to keep, at least 2, so that none is deleted while a server reads it.

        Raises:
          RefusedError: if a server computes in another dtype than `sampler`.
          ValueError: if `keep` is below 2.
        """
        if keep < 2:
            raise ValueError(
                f"keep={keep}: it must be at least 2, as a server may still read the last"
            )
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
        write_checkpoint(source, directory, version=version, model_dir=self._model_dir)
        self._published.append(directory)
        written = time.perf_counter() - start
        name, in_flight = directory.name, self._in_flight
        timings = swap_weights(
            self._servers, lambda s: s.update(name, version=version, in_flight=in_flight)
        )
        while len(self._published) > self._keep:
            shutil.rmtree(self._published.pop(0))
        return timings._replace(write=written)
