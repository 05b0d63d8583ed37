"""Snapshots of models, written to disk while the devices go on."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from jaxrl.service.files import Files, Stamp, write_tenant
from jaxrl.service.pool import Tenant
from jaxrl.service.state import Store

_log = logging.getLogger(__name__)


class Snapshots:
    """The last snapshot of each model. One thread calls; another one writes, in the same order."""

    def __init__(self, store: Store, files: Files, *, seconds: float) -> None:
        """Writes the files that `files` names; a model's next snapshot is due after `seconds`."""
        self._store, self._files, self._every = store, files, seconds
        self._begun, self._written = dict[str, float](), dict[str, Future[None]]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")

    def due(self, model: str) -> bool:
        """Tells whether a model's last snapshot is old, and on disk."""
        written = self._written.get(model)
        late = time.monotonic() - self._begun.get(model, -1e9) > self._every
        return late and (written is None or written.done())

    def write(self, model: str, tenant: Tenant, *, seq: int) -> None:
        """Begins to write a state that includes the model's requests up to `seq`. If that fails,
        the snapshot before it and the requests since remain."""
        self._begun[model] = time.monotonic()
        held = jax.device_get(tenant)
        self._written[model] = self._thread.submit(self._write, model, held, seq)

    def last(self, model: str) -> Stamp | None:
        """Returns the version of a model's last snapshot, once it is on disk; None without any."""
        self.settle(model)
        file = self._files.snapshot(model)
        return Stamp.of(file) if file.exists() else None

    def settle(self, model: str) -> None:
        """Waits until a model's snapshot is on disk."""
        if written := self._written.pop(model, None):
            written.result()

    def close(self) -> None:
        """Waits until all are on disk."""
        self._thread.shutdown()

    def _write(self, model: str, tenant: Tenant, seq: int) -> None:
        try:
            write_tenant(self._files.snapshot(model), tenant, seq=seq)
            self._store.cover(model, seq)
        except Exception:
            _log.exception("the snapshot of %s failed; its requests are kept", model)
