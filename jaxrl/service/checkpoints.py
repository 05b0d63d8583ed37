"""The checkpoints of all models: their files, and their rows in the state."""

import json
import time
from typing import Any

from tinker import types

from jaxrl.service import answers
from jaxrl.service.devices import Devices
from jaxrl.service.files import Files, Saved, Stamp, divided
from jaxrl.service.pool import Kind
from jaxrl.service.requests import Work
from jaxrl.service.state import Store, dumps
from jaxrl.service.wire import RefusedError

_HIDDEN_SECONDS = 7 * 86400  # weights of sampling clients that were made without a name


class Checkpoints:
    """Checkpoints by their paths, `tinker://MODEL/weights/NAME`, `.../sampler_weights/NAME` or
    `.../external_weights/NAME`.

    A name that was deleted may be given again. `PATH:N` is the checkpoint that the model's request
    N wrote, and no other.
    """

    def __init__(self, store: Store, files: Files, devices: Devices) -> None:
        """Keeps rows in `store` and weights of the tenants on `devices` in `files`."""
        self._store, self._files, self._devices = store, files, devices

    def write(self, work: Work, trained: Kind, path: str, kind: str, *, ttl: int | None) -> None:
        """Writes the present weights of a request's model, which trains `trained`; for `kind`
        "training" also what training goes on from. It expires after `ttl` seconds, unless that is
        None."""
        state = kind == "training"
        tenant = self._devices.read(trained, work.target, weights_only=not state)
        pool = self._devices.pool(trained)
        size = self._files.write_checkpoint(path, pool, tenant, state=state)
        row, now = self._store.model(work.target), time.time()
        content = json.loads(row["content"])
        metadata = getattr(work.payload, "user_metadata", None)
        content |= {"user_metadata": metadata, "request": work.id}
        end = ttl and now + ttl
        values = (path, work.target, row["owner"], kind, now, end, size, dumps(content))
        with self._store.transaction() as db:
            marks = "?, ?, ?, ?, ?, ?, ?, 0, ?"
            db.execute(f"INSERT OR REPLACE INTO checkpoints VALUES ({marks})", values)

    def save(self, work: Work, trained: Kind) -> str:
        """Writes what a request of the kind "save" or "external" names, the latter weights alone;
        returns its path."""
        request, external = work.payload, work.kind == "external"
        part = "external_weights" if external else "weights"
        path = f"tinker://{work.target}/{part}/{request.path or f'{work.seq:06d}'}"
        if external:
            self.check_new(path, work, advice="choose another name, or delete it")
        elif not request.overwrite:
            self.check_new(path, work, advice="choose another name, or overwrite=True")
        kind = "external" if external else "training"
        self.write(work, trained, path, kind, ttl=request.ttl_seconds)
        return path

    def publish(self, work: Work, trained: Kind) -> answers.Published:
        """Writes a model's present weights for sampling, and lets the samplers have them."""
        request: types.SaveWeightsForSamplerRequest = work.payload
        # A client's own name begins with no dot.
        hidden = request.path is None
        name = ".inflight" if request.kind == "inflight" else f".at-{work.seq:06d}"
        name = name if hidden else request.path
        path = f"tinker://{work.target}/sampler_weights/{name}"
        kind = "ephemeral" if hidden else "sampler"
        ttl = request.ttl_seconds or (_HIDDEN_SECONDS if hidden else None)
        if not hidden:  # sampling clients keep the weights that they were made with
            self.check_new(path, work, advice="choose another name, or delete it")
        self.write(work, trained, path, kind, ttl=ttl)
        self._devices.keep(trained, work.target, self.lasting(path))
        sampler = None
        if hidden:
            session = work.target.split(":train:")[0]
            sampler = f"{session}:sample:{request.sampling_session_seq_id or 0}"
            owner = self._store.model(work.target)["owner"]
            values = {"session": session, "owner": owner, "created": time.time(), "path": path}
            self._store.insert("samplers", id=sampler, next_clone=1, **values)
        return answers.Published(path=None if hidden else path, sampling_session_id=sampler)

    def check_new(self, path: str, work: Work, *, advice: str) -> None:
        """Raises RefusedError for a path that another request has written."""
        row = self._store.one("SELECT content FROM checkpoints WHERE path = ?", path)
        if row and json.loads(row["content"])["request"] != work.id:
            raise RefusedError(f"{path} exists; {advice}")

    def find(self, path: str) -> dict[str, Any]:
        """Returns the row of a checkpoint, given its path or `PATH:N`; raises RefusedError if there
        is none."""
        path, wanted = divided(path)
        row = self._store.one("SELECT * FROM checkpoints WHERE path = ?", path)
        if row is not None and not (row["expires"] and row["expires"] < time.time()):
            found = {**row, **json.loads(row["content"])}
            if wanted is None or found["request"] == f"{row['model']}:{wanted}":
                return found
        raise _missing(path)

    def readable(self, path: str, owner: str) -> dict[str, Any]:
        """Returns the row of a checkpoint that is the owner's or published; raises RefusedError in
        the same words whether there is none or it is another's."""
        row = self.find(path)
        if row["owner"] != owner and not row["public"]:
            raise _missing(path)
        return row

    def lasting(self, path: str) -> str:
        """Returns `PATH:N` for a path; unchanged for one of `inflight` weights, which change.
        Raises RefusedError as `find`."""
        row = self.find(path)
        return path if row["kind"] == "ephemeral" else f"{path}:{row['request'].rpartition(':')[2]}"

    def remove(self, path: str) -> None:
        """Deletes a checkpoint."""
        with self._store.transaction() as db:
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))
        self._files.delete(path)

    def saved(self, path: str) -> Saved:
        """Returns a checkpoint's files; raises RefusedError if there is none."""
        row = self.find(path)
        return Saved(path, Kind.of(row), Stamp.of(self._files.checkpoint(path)))

    def expire(self) -> None:
        """Deletes checkpoints whose time is over."""
        for row in self._store.all("SELECT path FROM checkpoints WHERE expires < ?", time.time()):
            self.remove(row["path"])


def _missing(path: str) -> RefusedError:
    path, _ = divided(path)
    return RefusedError(f"there is no checkpoint {path!r}; list those of the training run")
