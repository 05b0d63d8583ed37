"""Publishing through a shared directory; each version is a Hugging Face checkpoint."""

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from jaxrl.bridge import manifest, payload, safetensors_file
from jaxrl.bridge.base import InFlight, Learner, Timings, WeightSource
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.owned_directory import OwnedDirectory, lock_file
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.swap import WeightPublisher

# Weights of the model's checkpoint; all its other files are copied.
_NOT_COPIED = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
_MAX_FILE_BYTES = 5 * 10**9  # exceeded only by a single larger tensor
_KEEP = 2  # published versions: a server may still read the last
_VERSION = re.compile(r"version-(0|[1-9]\d*)")
_LOCK = ".jaxrl-lock"  # held by the learner that publishes to a root


def write_checkpoint(
    source: WeightSource, directory: Path, *, version: int, learner: Learner, model_dir: Path
) -> None:
    """Writes a checkpoint with a manifest; its directory appears whole or not at all.

    Configuration and tokenizer are copied from the checkpoint `model_dir`.

    Raises:
      FileExistsError: if `directory` exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; a published version is never overwritten")
    draft = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    draft.mkdir()
    try:
        files = safetensors_file.plan_files(source.specs(), max_file_bytes=_MAX_FILE_BYTES)
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

            written = payload.write_tensors(
                source, files, write_bytes, version=version, learner=learner
            )
            for handle in handles.values():
                os.fsync(handle.fileno())
        payload.write_manifest(draft, written)
        draft.rename(directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class DirectoryPublisher(WeightPublisher):
    """Publishes through a shared file system.

    Version n becomes the checkpoint `root/version-n`, which any program can load. The last two are
    kept. A resumed run publishes some versions again and replaces them. Only directories that a
    learner has published are ever removed.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        root: Path,
        *,
        model_dir: Path,
        wire: np.dtype,
        sampler: np.dtype,
        in_flight: InFlight = "keep",
        learner: Learner | None = None,
    ) -> None:
        """Connects the servers as `WeightPublisher` does; creates the root if it is missing.

        Configuration and tokenizer of each version are copied from the checkpoint `model_dir`.

        Raises:
          FileExistsError: if another learner publishes to the root, or something in it that no
            learner has published has the name of a version.
        """
        root.mkdir(parents=True, exist_ok=True)
        self._model_dir = model_dir
        with ExitStack() as stack:
            lock = lock_file(root / _LOCK)
            if lock is None:
                raise FileExistsError(
                    f"another learner publishes to {root}; wait for its end, or set another "
                    "sampler.directory"
                )
            stack.callback(os.close, lock)
            self._published = _published(root)
            self._drafts = stack.enter_context(OwnedDirectory(root)).path
            super().__init__(
                servers,
                root,
                wire=wire,
                sampler=sampler,
                in_flight=in_flight,
                learner=learner,
            )
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Releases the root to other learners; the published versions stay."""
        self._stack.close()

    def publish(self, source: WeightSource, *, version: int) -> Timings:
        """See `WeightPublisher.publish`."""
        timings = super().publish(source, version=version)
        while len(self._published) > _KEEP:
            self._remove(self._published.pop(0))
        return timings

    def _write(self, source: WeightSource, *, version: int) -> str:
        directory = self._root / f"version-{version}"
        # Killed at any moment, this process leaves a draft or a whole version.
        draft = self._drafts / secrets.token_hex(8)
        write_checkpoint(
            source,
            draft,
            version=version,
            learner=self._learner,
            model_dir=self._model_dir,
        )
        if directory in self._published:
            self._published.remove(directory)
            self._remove(directory)
        draft.rename(directory)
        self._published.append(directory)
        return directory.name

    def _remove(self, directory: Path) -> None:
        old = self._drafts / secrets.token_hex(8)
        with suppress(FileNotFoundError):  # its user may have removed it
            directory.rename(old)
            shutil.rmtree(old)


def _published(root: Path) -> list[Path]:
    """Returns the versions that learners have published below a root, the oldest first.

    Raises:
      FileExistsError: if something else has the name of a version.
    """
    found = []
    for path in root.iterdir():
        if name := _VERSION.fullmatch(path.name):
            try:
                if path.is_symlink() or manifest.read(path).version != int(name[1]):
                    raise ManifestError("it is a link, or its manifest has another version")
            except ManifestError as error:
                raise FileExistsError(
                    f"{path} was not published by a learner ({error}); move it, or set another "
                    "sampler.directory"
                ) from None
            found.append(path)
    return sorted(found, key=lambda path: path.stat().st_mtime)
