"""The sampler of a run, and how the learner's weights reach it."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from jaxrl.bridge.source import ParamsSource
from jaxrl.builders.layout import sampler_layout
from jaxrl.builders.servers import Adapters, Publish, ServingConfig, open_servers
from jaxrl.core.hosts import Hosts
from jaxrl.core.precision import Precision
from jaxrl.models import lora
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.monitoring.ratio.replay import Score
from jaxrl.sampling.base import Sampler
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sampling.multihost import Absent, Mirrored
from sharding.collectives import collectives
from sharding.partition import Layout


class Serving(NamedTuple):
    """A sampler, the way to it, and its log-probs of given tokens if it is another program."""

    sampler: Sampler
    publish: Publish
    score: Score | None = None


@contextmanager
def open_sampler(
    config: ServingConfig,
    model: Model,
    *,
    params: Params,
    version: int,
    policy: Precision,
    layout: Layout,
    directory: Path,
    note: Callable[[str], None],
    hosts: Hosts | None = None,
    adapters: Adapters | None = None,
    record_experts: bool = False,
    answers: int = 1,
) -> Iterator[Serving]:
    """The sampler of the config, which serves `params` as `version`.

    Args:
      config: of the run.
      model: the decoder.
      params: the learner's weights.
      version: theirs.
      policy: the run's.
      layout: the learner's devices.
      directory: the run's; a server that is started here logs there.
      note: shows a line to the user.
      hosts: the processes of the run, the first of which talks to servers; None for one.
      adapters: if servers shall get adapters by themselves and not whole weights.
      record_experts: whether the embedded sampler's answers say which experts drew them.
      answers: that are asked for at a time; a server that is started here gets room for them.

    Raises:
      ValueError, FileNotFoundError: as `started_server`.
      ServerFailedError: if a server does not start.
      RefusedError: if a server computes in another dtype than the policy says.
    """
    hosts = hosts or Hosts()
    if config.sampler.name == "embedded":
        sampler, load = _embedded(
            config,
            model,
            lora.merge(params),
            version=version,
            policy=policy,
            layout=layout,
            record_experts=record_experts,
        )
        yield Serving(sampler if hosts.count == 1 else Mirrored(sampler, hosts), load)
        return
    if hosts.count > 1 and adapters is not None:
        raise ValueError(
            "lora.publish = 'adapters' works in one process only; set lora.publish = 'merged'"
        )
    if not hosts.leads:
        follow = _follow(model, policy)
        follow(params, version=version)
        yield Serving(Absent(), follow)
        return
    with open_servers(
        config,
        model,
        policy=policy,
        directory=directory,
        note=note,
        adapters=adapters,
        answers=answers,
    ) as (client, publish):
        publish(params, version=version)
        yield Serving(client, publish, client.score)


def _embedded(
    config: ServingConfig,
    model: Model,
    merged: Params,
    *,
    version: int,
    policy: Precision,
    layout: Layout,
    record_experts: bool,
) -> tuple[EmbeddedSampler, Publish]:
    """The sampler on the learner's devices, and the way to it."""
    own = sampler_layout(config.sampler, layout)
    several = layout.mesh.size > 1
    sampler = EmbeddedSampler(
        model._replace(local=own.local) if several else model,
        merged,
        precision=policy,
        version=version,
        max_batch=config.sampling.max_batch,
        layout=own if several else None,
        record_experts=record_experts,
    )
    numbers: dict[str, float] = {}
    if several:
        moved = collectives(sampler.transfer_hlo(merged), trips=lambda _: 1)
        numbers["publish/bytes_sent"] = sum(traffic.sent for traffic in moved.values())

    def load(params: Params, *, version: int) -> dict[str, float]:
        sampler.load(lora.merge(params), version=version)
        return numbers

    return sampler, load


def _follow(model: Model, policy: Precision) -> Publish:
    """The part of the other processes in a publish: they gather the tensors, too."""

    def follow(params: Params, *, version: int) -> dict[str, float]:
        del version
        deque(ParamsSource(lora.merge(params), model.specs, dtype=policy.wire), maxlen=0)
        return {}

    return follow
