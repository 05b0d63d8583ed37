"""The training states of a service on its devices, and the operations that all processes do."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.service.files import Files, Saved, Stamp, read_tenant, served
from jaxrl.service.pool import Base, Kind, Pool, Scored, Tenant
from jaxrl.service.processes import Processes, everywhere
from jaxrl.service.sampling import Samplers
from jaxrl.service.stacks import to_host
from jaxrl.service.wire import Batch


class Devices:
    """Tenants of all kinds, and the samplers of their weights. Each process has one; the engine's
    calls on process 0 are done by all, in the same order."""

    def __init__(
        self,
        base: Base,
        *,
        files: Files,
        samplers: Callable[[Callable[[Saved], Any]], Samplers],
        microbatch_tokens: int,
        processes: Processes | None = None,
    ) -> None:
        """Makes it without tenants.

        Args:
          base: the model.
          files: snapshots and checkpoints, in a directory that all processes share.
          samplers: makes the sampler, given a function that reads the weights of a checkpoint.
          microbatch_tokens: the largest batch of a forward and backward pass, padding included.
          processes: those of the service; by default this one.
        """
        self.base, self.processes = base, processes or Processes()
        self.samplers = samplers(self._read_weights)
        self._files, self._tokens = files, microbatch_tokens
        self._pools = dict[Kind, Pool]()

    def pool(self, kind: Kind) -> Pool:
        """Returns the tenants of a kind."""
        if kind not in self._pools:
            self._pools[kind] = Pool(self.base, kind, tokens=self._tokens)
        return self._pools[kind]

    def tenants(self) -> list[tuple[str, Kind]]:
        """Lists the tenants on the devices."""
        return [(name, kind) for kind, pool in self._pools.items() for name in pool.tenants]

    @everywhere
    def clear(self) -> None:
        """Removes all tenants, whose states an error may have lost."""
        self._pools.clear()

    @everywhere
    def add(self, kind: Kind, model: str, *, seed: int, snapshot: Stamp | None) -> int:
        """Adds a new tenant, or one from its snapshot; returns the last request that it
        includes, -1 for a new one."""
        pool, seq = self.pool(kind), -1
        tenant = pool.fresh(seed)
        if snapshot is not None:
            file = self._files.snapshot(model)
            snapshot.wait(file)
            tenant, seq = read_tenant(file, like=tenant)
        pool.add(model, tenant)
        return seq

    @everywhere
    def remove(self, kind: Kind, model: str) -> None:
        """Frees a tenant's slot."""
        self._pools[kind].remove(model)

    @everywhere
    def load(self, kind: Kind, model: str, saved: Saved, *, optimizer: bool) -> None:
        """Replaces a tenant's state by that of a checkpoint, with or without its optimizer."""
        pool = self._pools[kind]
        saved.stamp.wait(self._files.checkpoint(saved.path))
        pool.write(model, self._files.read_state(saved.path, pool, optimizer=optimizer))

    @everywhere
    def compute(self, kind: Kind, requests: Sequence[tuple[str, Batch]]) -> list[Scored]:
        """See `Pool.compute`."""
        return self._pools[kind].compute(requests)

    @everywhere
    def step(self, kind: Kind, model: str, settings: Mapping[str, float]) -> dict[str, float]:
        """See `Pool.step`."""
        return self._pools[kind].step(model, settings)

    @everywhere
    def read(self, kind: Kind, model: str, *, weights_only: bool = False) -> Tenant:
        """Returns a copy of a tenant's state; with several processes on the host of process 0,
        and with `weights_only` nothing there but the parameters."""
        tenant, keep = self._pools[kind].read(model), self.processes.hosts.leads
        if not self.processes.several:
            return tenant
        if weights_only:
            params = to_host(tenant.state.params, keep=keep)
            return tenant._replace(state=dataclasses.replace(tenant.state, params=params))
        return to_host(tenant, keep=keep)

    @everywhere
    def keep(self, kind: Kind, model: str, name: str) -> None:
        """Lets the samplers have a tenant's present weights under a name."""
        pool = self._pools[kind]
        self.samplers.keep(name, served(pool, pool.weights(model)))

    def _read_weights(self, saved: Saved) -> Any:
        saved.stamp.wait(self._files.checkpoint(saved.path))
        return self._files.read_weights(saved.path, self.pool(saved.kind))
