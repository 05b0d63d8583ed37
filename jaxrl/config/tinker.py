"""The keys of `jaxrl tinker`."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from jaxrl.config.hosts import HostsConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.section import Attention, Remat
from jaxrl.config.tables import BaseConfig
from jaxrl.core import disagreement


class TinkerConfig(BaseConfig):
    """Settings of the service."""

    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port to listen at; 0 takes a free one."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback is open to other machines and needs the
    environment variable TINKER_API_KEY."""

    name: str | None = None
    """Name of the base model for clients, such as Qwen/Qwen3-8B; default: MODEL_DIR as given."""

    state_dir: str = "runs/tinker"
    """Directory of checkpoints and of all that a restarted server goes on from."""

    microbatch_tokens: PositiveInt = 8192
    """Tokens, padding included, of one forward and backward pass, over all tenants in it."""

    sampler: str = "embedded"
    """`embedded` samples with JAX on the devices of training. The address of a vLLM server on this
    machine, which `jaxrl serve MODEL_DIR --max_lora_rank RANK` runs, samples there; several with
    commas in between. `vllm` starts one, for ranks up to 64."""

    slots: PositiveInt = 16
    """Tenants with adapters on the devices; others wait on disk."""

    max_batch: PositiveInt = 64
    """Samples drawn at once."""

    snapshot_seconds: NonNegativeInt = 30
    """A model is written to disk after an optimizer step if the last time is longer ago. Requests
    since then are kept and computed again after a restart, so that nothing is lost."""

    remat: Remat = "matmuls"
    attention: Attention = "auto"
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()

    def _contradictions(self) -> Iterator[str]:
        if self.precision.blocks not in ("none", "int8") and self.sampler != "embedded":
            yield (
                f"precision = {self.precision.text!r} and sampler = {self.sampler!r}: "
                f"blocks={self.precision.blocks} applies to sampler = 'embedded' only; use "
                "blocks=int8, which vLLM has on CPUs, or leave one of the two out"
            )
        if self.precision.sums != "fixed":
            return
        key = f"precision = {self.precision.text!r}: sums=fixed"
        if self.sampler != "embedded":
            yield f"{key} applies to sampler = 'embedded' only; leave it out"
        if (difference := disagreement(self.precision)) is not None:
            yield f"{key}, but {difference}"
