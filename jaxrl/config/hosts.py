"""The `[hosts]` table of a config."""

import re
from collections.abc import Iterator

from pydantic import NonNegativeInt, PositiveInt, field_validator

from jaxrl.config.section import Section


def is_address(text: str) -> bool:
    """Tells if a text has the form HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and re.fullmatch(r"[0-9]{1,5}", port) is not None and int(port) < 65536


class HostsConfig(Section):
    """Several processes that train one model on all of their devices."""

    coordinator: str | None = None
    """HOST:PORT of process 0, or `auto` where jax detects the cluster (Slurm, Open MPI, Kubernetes,
    Cloud TPU). Default: the environment variable JAX_COORDINATOR_ADDRESS, else a single process."""

    processes: PositiveInt | None = None
    """Number of processes. Default: the environment variable JAX_NUM_PROCESSES, else what jax
    detects."""

    process: NonNegativeInt | None = None
    """Index of this process, from 0. Default: the environment variable JAX_PROCESS_ID, else what
    jax detects."""

    @field_validator("coordinator")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value not in (None, "auto") and not is_address(value):
            raise ValueError("expected HOST:PORT of process 0, such as host0:9911, or 'auto'")
        return value

    def _contradictions(self) -> Iterator[str]:
        if self.process is not None and self.process >= (self.processes or self.process + 1):
            yield (
                f"hosts.process = {self.process} and hosts.processes = {self.processes}: processes "
                f"are numbered from 0 to {(self.processes or 1) - 1}"
            )
