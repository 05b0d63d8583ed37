"""Training states and weights on disk."""

import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tinker.types import ParsedCheckpointTinkerPath

from jaxrl import huggingface
from jaxrl.core import cast
from jaxrl.models import lora
from jaxrl.service.pool import ALPHA, Kind, Pool, Tenant
from jaxrl.sharding import place

_STATE = "state.npz"
_PATIENCE = 60.0  # seconds: a network file system may show what was there before


class Stamp(NamedTuple):
    """The version of a file, or of the files of a directory.

    Attributes:
      files: name, bytes and time of change of each.
    """

    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """Looks at a path, which must exist."""
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = ((file.name, file.stat()) for file in files)
        return cls(tuple((name, one.st_size, one.st_mtime_ns) for name, one in found))

    def wait(self, path: Path) -> None:
        """Waits until this host sees the version that process 0 has seen.

        Raises:
          OSError: if it does not.
        """
        until = time.monotonic() + _PATIENCE
        while not path.exists() or Stamp.of(path) != self:
            if time.monotonic() > until:
                raise OSError(
                    f"{path} is not what process 0 has there; state_dir must be one directory that "
                    "all hosts share"
                )
            time.sleep(0.1)


class Saved(NamedTuple):
    """A checkpoint: its tinker path, what it trained, and its files."""

    path: str
    kind: Kind
    stamp: Stamp


class Files:
    """The files of a service, under one directory: `snapshots/MODEL.npz` and
    `checkpoints/MODEL/KIND/NAME`, where KIND is `weights`, `sampler_weights` or
    `external_weights`."""

    def __init__(self, directory: Path, *, base_name: str) -> None:
        """Names the files; `base_name` is written into adapters as their base model."""
        self._directory, self._base_name = directory, base_name
        for part in ("snapshots", "checkpoints"):
            (directory / part).mkdir(parents=True, exist_ok=True)

    def snapshot(self, model: str) -> Path:
        """Returns the file of a model's snapshot, which may not exist."""
        return self._directory / "snapshots" / f"{_plain(model)}.npz"

    def checkpoint(self, path: str) -> Path:
        """Returns the directory of a tinker path, which may not exist."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(divided(path)[0])
        name = _plain(parsed.checkpoint_id)
        return self._directory / "checkpoints" / _plain(parsed.training_run_id) / name

    def write_checkpoint(self, path: str, pool: Pool, tenant: Tenant, *, state: bool) -> int:
        """Writes weights in the format of Hugging Face or PEFT, with `state` also what training
        goes on from. The directory appears whole. Returns its size in bytes."""
        directory = self.checkpoint(path)
        draft = directory.with_name(f".{directory.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            self._write(draft, pool, tenant, state=state)
            size = sum(file.stat().st_size for file in draft.iterdir())
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(draft, directory)
        except BaseException:  # on a full disk the answers need the room
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return size

    def _write(self, directory: Path, pool: Pool, tenant: Tenant, *, state: bool) -> None:
        wire, model = pool.base.precision.wire, pool.base.model
        if pool.kind.rank:
            params = jax.device_get(tenant.state.params)
            huggingface.save_adapter(
                directory, params, specs=pool.specs, base=self._base_name, dtype=wire
            )
        else:
            huggingface.save(directory, tenant.state.params, model.config, dtype=wire)
        if state:
            write_tenant(directory / _STATE, tenant, seq=-1)

    def read_state(self, path: str, pool: Pool, *, optimizer: bool) -> Tenant:
        """Reads what `write_checkpoint` wrote; without `optimizer` the moments begin anew."""
        file = self.checkpoint(path) / _STATE
        found, _ = read_tenant(file, like=pool.fresh(0))
        return found if optimizer else pool.holding(found.state.params)

    def read_weights(self, path: str, pool: Pool) -> Any:
        """Reads the weights of a checkpoint in `precision.wire`, for the sampler."""
        directory, wire = self.checkpoint(path), pool.base.precision.wire
        if not pool.kind.rank:
            params = huggingface.load(directory, dtype=wire)[1]
            return place(params, pool.base.layout.tree(pool.specs))
        adapters = huggingface.load_adapter(directory, pool.specs, dtype=wire)
        return served(pool, place(adapters, pool.base.layout.tree(pool.specs.adapters)))

    def delete(self, path: str) -> None:
        """Deletes a checkpoint's files."""
        shutil.rmtree(self.checkpoint(path), ignore_errors=True)


def served(pool: Pool, weights: Any) -> Any:
    """Returns trained weights as the sampler takes them, in `precision.wire`: adapters beside the
    base, or with fixed sums merged, as they are trained."""
    rounded = cast(weights, pool.base.precision.wire)
    if not pool.kind.rank:
        return rounded
    adapted = lora.Adapted(rounded, pool.base.params, ALPHA)
    return lora.merge(adapted) if pool.base.precision.sums == "fixed" else adapted


def write_tenant(file: Path, tenant: Tenant, *, seq: int) -> None:
    """Writes a training state bit for bit. The file appears whole. `seq` is the last request that
    the state includes."""
    leaves = jax.device_get(jax.tree.leaves(tenant))
    arrays: dict[str, Any] = {
        str(i): np.ascontiguousarray(x).view(np.uint8) if x.ndim else np.atleast_1d(x)
        for i, x in enumerate(leaves)
    }
    arrays["seq"] = np.array([seq])
    draft = file.with_name(f".{file.name}.draft")
    try:
        with draft.open("wb") as stream:
            np.savez(stream, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_tenant(file: Path, *, like: Tenant) -> tuple[Tenant, int]:
    """Inverts `write_tenant`; `like` has the shapes and dtypes."""
    with np.load(file) as arrays:
        leaves, structure = jax.tree.flatten(like)
        found = [arrays[str(i)].view(x.dtype).reshape(x.shape) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, found), int(arrays["seq"][0])


def divided(path: str) -> tuple[str, str | None]:
    """Divides `PATH:N` into its path and N; None for a path alone. Names hold no colon."""
    end = path.find(":", path.rfind("/"))
    return (path, None) if end < 0 else (path[:end], path[end + 1 :])


def _plain(name: str) -> str:
    """Returns a file name for an id; a colon is not allowed everywhere."""
    return name.replace(":", "_")
