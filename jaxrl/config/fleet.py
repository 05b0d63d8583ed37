"""The `[fleet]` table of a config."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from jaxrl.config.bucket import is_bucket
from jaxrl.config.hosts import HostsConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.config.section import Seconds, Section, Texts

Resources = dict[str, float]
"""Amounts of resources by Ray's names."""

_SLICE = re.compile(r"[a-z0-9]+:\d+(x\d+){1,2}")


def read_resources(texts: Sequence[str]) -> Resources:
    """Reads resources written NAME=NUMBER; raises ValueError for a text in another form."""
    found: Resources = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        if not name or not 0 < amount < math.inf:
            raise ValueError(f"{text!r} is not NAME=NUMBER, such as GPU=8, CPU=16 or CPU=0.5")
        if name in found:
            raise ValueError(f"{name} is there twice; leave one of the two out")
        found[name] = amount
    if not found:
        raise ValueError("the list is empty; write at least one resource, such as CPU=1")
    return found


class FleetConfig(Section):
    """The parts of a run on a cluster: learner hosts, servers and workers, started, watched and
    restarted by Ray. The other keys count only with an engine."""

    engine: Literal["ray"] | None = None
    """`ray` starts the parts in the Ray cluster at RAY_ADDRESS, in one that runs on this machine,
    or in a new one on this machine. Needs jaxrl[ray]. `none` runs without an engine."""

    learners: PositiveInt = 1
    """Learner hosts: processes that train one model on all of their devices, as with [hosts]."""

    learner_resources: Texts = ("CPU=1",)
    """Ray resources of each learner host, written NAME=NUMBER: GPU=8, CPU=16, or a name of your
    own."""

    learner_slice: str | None = None
    """A TPU slice for the learner by generation and topology, such as `v6e:4x4`. Its hosts are the
    learner hosts, with all of their chips; leave fleet.learners out."""

    servers: NonNegativeInt = 0
    """vLLM servers for sampler.name = 'vllm', as sampler.python, sampler.device and
    sampler.vllm_args describe them. With 0 the servers of sampler.url are used."""

    server_resources: Texts = ("CPU=1",)
    """Ray resources of each server, such as GPU=2 with --tensor-parallel-size 2."""

    workers: NonNegativeInt = 0
    """Processes that play whole groups from vLLM servers: requests, episodes, tools, rewards. With
    another sampler they only compute the functions of reward.path and judge.path. With 0 the
    learner's process 0 does all of this."""

    worker_resources: Texts = ("CPU=1",)
    """Ray resources of each worker. A reward that starts processes, such as python_tests, has as
    many at a time as the worker has CPUs."""

    restarts: NonNegativeInt = 3
    """Times that the learner is restarted from its last checkpoint after a learner host died. An
    error that the run reports is not retried."""

    wait: Seconds = 60.0
    """Seconds to wait for resources that the cluster lacks, and for a lost host's replacement."""

    @field_validator("learner_resources", "server_resources", "worker_resources")
    @classmethod
    def _check_resources(cls, value: Texts) -> Texts:
        read_resources(value)
        return value

    @field_validator("learner_slice")
    @classmethod
    def _check_slice(cls, value: str | None) -> str | None:
        if value is not None and not _SLICE.fullmatch(value):
            raise ValueError("expected GENERATION:TOPOLOGY, such as v6e:4x4 or v5p:2x2x4")
        return value

    def _contradictions(self) -> Iterator[str]:
        if self.learner_slice is not None and self.learners != 1:
            yield (
                f"fleet.learners = {self.learners} and fleet.learner_slice = "
                f"{self.learner_slice!r}, whose hosts are the learner hosts; leave fleet.learners "
                "out"
            )

    def conflicts(
        self, sampler: SamplerConfig, hosts: HostsConfig, *, run_dir: str
    ) -> Iterator[str]:
        """Yields one line for each contradiction with other tables, with the fix."""
        if sampler.store is not None and not (sampler.url or (self.engine and self.servers)):
            yield (
                f"sampler.store = {sampler.store!r} is for running servers and those of a fleet; "
                "set sampler.url to their addresses (jaxrl serve), or fleet.engine and "
                "fleet.servers, or leave it out"
            )
        if self.engine is None:
            return
        if is_bucket(run_dir):
            yield (
                f"run_dir = {run_dir!r} and fleet.engine, whose hosts write to the same directory; "
                "give one on storage that they share"
            )
        if self.servers and sampler.name != "vllm":
            yield (
                f"fleet.servers = {self.servers} and sampler.name = {sampler.name!r}, which uses "
                "no server; set sampler.name = 'vllm', or leave fleet.servers out"
            )
        if self.servers and sampler.sleep:
            yield (
                f"fleet.servers = {self.servers} and sampler.sleep, which is for a server on the "
                "learner's own GPU; leave one of the two out"
            )
        if hosts.coordinator == "auto":
            yield (
                "hosts.coordinator = 'auto' and fleet.engine: the fleet starts the processes and "
                "gives them their addresses; leave hosts.coordinator out"
            )
