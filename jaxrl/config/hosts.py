"""The `[hosts]` table of a config: which of several processes this is."""

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from jaxrl.config.tables import Section


class HostsConfig(Section):
    """Several processes that train one model, on the devices of all of them."""

    coordinator: str | None = None
    """HOST:PORT of process 0; `auto` where jax knows the cluster (Slurm, Open MPI, Kubernetes,
    Cloud TPU). Default: the environment's JAX_COORDINATOR_ADDRESS, else one process."""

    processes: PositiveInt | None = None
    """How many. Default: the environment's JAX_NUM_PROCESSES, else what jax finds."""

    process: NonNegativeInt | None = None
    """Which this is, from 0. Default: the environment's JAX_PROCESS_ID, else what jax finds."""

    join: int = Field(default=60, ge=1)
    """Seconds that a process waits for the others at the beginning."""

    heartbeat: int = Field(default=30, ge=5, le=60)
    """Seconds after which a silent process counts as dead and the run ends."""

    @model_validator(mode="after")
    def _place_fits(self) -> Self:
        if self.process is not None and self.process >= (self.processes or self.process + 1):
            raise ValueError(
                f"hosts.process = {self.process} and hosts.processes = {self.processes}: processes "
                f"are numbered from 0 to {(self.processes or 1) - 1}"
            )
        return self
