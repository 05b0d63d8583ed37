"""Builds the sampler that a config names, with the weight sync from the learner to it."""

import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.bridge import StockServer, VllmServer, given_key, headers, known_key
from jaxrl.builders import servers
from jaxrl.builders.gpu_memory import check_room
from jaxrl.builders.layout import sampler_layout
from jaxrl.builders.stock_servers import all_stock, make_base_check
from jaxrl.builders.tpu_engine import open_tpu_engine
from jaxrl.builders.weight_sync import (
    Adapters,
    Listed,
    Publish,
    PublishToServers,
    Sync,
    WeightRoute,
    follower,
    open_send,
    run_learner,
)
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core import Hosts
from jaxrl.diagnostics import Score
from jaxrl.models import Params, lora
from jaxrl.sampling import (
    EmbeddedSampler,
    MultihostSampler,
    NullSampler,
    OneAtATime,
    Sampler,
    StockSampler,
    VllmSampler,
)
from jaxrl.sharding import Layout, collectives


class SamplerNeeds(NamedTuple):
    """A run's requirements of its sampler."""

    longest_sequence: int  # maximum length of a prompt with its completion, in tokens
    max_batch: int  # completions that a sampler in this process decodes at once
    adapters: Adapters | None = None  # given if servers receive adapters instead of whole weights
    record_experts: bool = False  # completions name the experts of each token
    record_kept: bool = False  # completions name the tokens that truncated sampling kept
    completions: int = 1  # requested at the same time
    servers: Listed = lambda: None  # those of its fleet at present


class Connection(NamedTuple):
    """A run's way to its servers, for clients in other processes."""

    kind: type[VllmSampler]
    urls: Sequence[str]
    settings: Mapping[str, Any]  # further arguments of `kind`

    def open(self, *, first: int, max_requests: int) -> VllmSampler:
        """Makes a client without connecting. Of equally loaded servers it prefers the one with the
        number `first`, so that many clients do not all begin with the same one."""
        first %= len(self.urls)
        urls = [*self.urls[first:], *self.urls[:first]]
        settings: dict[str, Any] = {**self.settings, "max_requests": max_requests}
        return self.kind(urls, **settings)


class Serving(NamedTuple):
    """A sampler, and the function that publishes weights to it."""

    sampler: Sampler
    publish: Publish
    score: Score | None = None  # a server's log-probs of given tokens
    # Names and values of what the sampler's arithmetic depends on; a server takes 15 seconds.
    facts: Callable[[], dict[str, str]] = dict
    sleep: Callable[[], None] = lambda: None  # gives the sampler's memory back until a publish
    connection: Connection | None = None  # None unless servers sample


@contextmanager
def open_sampler(
    config: SamplerConfig,
    weights: WeightRoute,
    *,
    layout: Layout,
    needs: SamplerNeeds,
    directory: Path,
    note: Callable[[str], None],
    hosts: Hosts | None = None,
) -> Iterator[Serving]:
    """Opens the sampler of the config, which serves `weights` from the start.

    `weights` and `layout` are the learner's. `directory` gets the log of a server that is started.
    Process 0 of `hosts` talks to servers. `note` shows a line to the user.

    Raises:
      ValueError, FileNotFoundError, ServerFailedError: as `starting_server`.
      ValueError: for servers of a model whose output layer an adapter unties from the embedding,
        for `sampler.name = "vllm_tpu"` in a run of several processes, or as
        `open_tpu_engine` or `check_room`.
      RefusedError: if a server computes in another dtype than `precision` says, or one without
        jaxrl's engine has another base model.
    """
    hosts = hosts or Hosts()
    if config.name != "embedded" and weights.checkpoint.unties:
        raise ValueError(
            f"lora.targets names lm_head, but {weights.checkpoint.directory} has one matrix for "
            f"embedding and output layer, and so has a server; set sampler.name = 'embedded', or "
            "leave lm_head out"
        )
    if config.name == "embedded":
        serving = _embedded(config, weights, layout=layout, needs=needs)
        if hosts.count > 1:
            serving = serving._replace(sampler=MultihostSampler(serving.sampler, hosts))
        yield serving
        return
    if config.name == "vllm_tpu":
        if hosts.count > 1:
            raise ValueError(
                f"sampler.name = 'vllm_tpu' needs a single process, and there are {hosts.count}: "
                "the engine steps the devices of one; set sampler.name = 'embedded', or 'vllm' "
                "with servers on other hosts"
            )
        length = min(needs.longest_sequence, weights.model.config.max_positions)
        sampler, publish, facts = open_tpu_engine(
            config,
            weights,
            devices=layout.mesh.devices.flat,
            max_model_len=length,
            max_batch=min(needs.max_batch, needs.completions),
            note=note,
        )
        yield Serving(sampler, publish, facts=lambda: facts)
        return
    if hosts.count > 1 and needs.adapters is not None:
        raise ValueError(
            f"lora.publish = 'adapters' needs a single process, and there are {hosts.count}; set "
            "lora.publish = 'merged'"
        )
    sync = Sync(config, weights, hosts.on_leader(lambda: run_learner(directory)), hosts)
    if not hosts.leads:
        follow = follower(sync)
        follow(weights.params, version=weights.version)
        yield Serving(NullSampler(), follow)
        return
    with _open_client(sync, needs=needs, directory=directory, note=note, layout=layout) as serving:
        serving.publish(weights.params, version=weights.version)
        yield serving


@contextmanager
def _open_client(
    sync: Sync, *, needs: SamplerNeeds, directory: Path, note: Callable[[str], None], layout: Layout
) -> Iterator[Serving]:
    """Opens a client of the config's servers, or of one that is started here."""
    config, weights = sync.config, sync.weights
    limit = weights.model.config.max_positions
    # No one else needs the key of a run's own server.
    key = known_key() if config.url else given_key() or secrets.token_hex(16)
    with ExitStack() as stack:
        urls = config.url
        if not urls:
            if layout.mesh.devices.flat[0].platform == "gpu":
                check_room(config)
            starting = servers.starting_server(
                config,
                weights.checkpoint,
                dtype=weights.precision.sampler,
                logits=weights.precision.logits.name,
                blocks=weights.precision.blocks,
                log=directory / "vllm.log",
                note=note,
                completions=needs.completions,
                # One more than the longest sequence: vLLM draws a token even if it only scores.
                max_model_len=min(needs.longest_sequence + 1, limit),
                max_lora_rank=0 if needs.adapters is None else needs.adapters.specs.rank,
                record_experts=needs.record_experts,
                sleep=config.sleep,
                record_kept=needs.record_kept,
                api_key=key,
            )
            urls = (stack.enter_context(starting).wait().url,)
        connect = functools.partial(
            VllmServer, timeout=config.timeout, api_key=key, sleeps=config.sleep
        )
        named = [connect(url) for url in urls]
        stock = bool(config.url) and all_stock(named, adapters=needs.adapters is not None)
        settings: dict[str, Any] = dict(
            max_positions=limit,
            vocab_size=weights.model.config.vocab_size,
            max_requests=config.max_requests,
            timeout=config.timeout,
            headers=headers(key),
            routed_layers=weights.model.config.routed_layers if needs.record_experts else 0,
            record_kept=needs.record_kept,
        )
        kind = StockSampler if stock else VllmSampler
        client, check = kind(urls, **settings), None
        stack.callback(client.close)
        if stock and needs.record_kept:
            raise ValueError(
                f"{', '.join(urls)}: without jaxrl's engine a server does not report the tokens "
                "that sampling.top_p, top_k or min_p keeps; leave these keys out, or start it with "
                "jaxrl serve"
            )
        if stock:
            named = [StockServer(url, timeout=config.timeout, api_key=key) for url in urls]
            open_client = functools.partial(StockSampler, **settings)
            check = make_base_check(weights, layout=layout, client=open_client)
            note(
                f"{', '.join(urls)}: without jaxrl's engine, so the base model is compared by "
                "log-probs; requests have no seed, and nothing is scored (probe.replay)"
            )
        send = stack.enter_context(open_send(sync, named, adapters=needs.adapters, check=check))
        publish = PublishToServers(
            send,
            named,
            client=client,
            note=note,
            learner=sync.learner,
            listed=needs.servers,
            connect=connect,
        )
        facts = functools.partial(facts_of_servers, named)
        sleep = functools.partial(_sleep, named, config) if config.sleep else lambda: None
        score = None if stock else client.score
        yield Serving(client, publish, score, facts, sleep, Connection(kind, urls, settings))


def _sleep(servers: Sequence[VllmServer], config: SamplerConfig) -> None:
    for server in servers:
        server.sleep(in_flight=config.in_flight)


def facts_of_servers(named: Sequence[VllmServer]) -> dict[str, str]:
    """Joins the facts of several servers; where they differ, each value is named."""
    found = [server.facts() for server in named]
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: sorted({one.get(name, "unknown") for one in found}) for name in names}
    return {"sampler": "vLLM"} | {name: " and ".join(texts) for name, texts in values.items()}


def _embedded(
    config: SamplerConfig, weights: WeightRoute, *, layout: Layout, needs: SamplerNeeds
) -> Serving:
    sums, several = weights.precision.sums, layout.mesh.size > 1
    own = sampler_layout(config, layout, weights.model, sums=sums)
    merged = lora.merge(weights.params)
    placed = several or config.devices > 0
    sampler = EmbeddedSampler(
        weights.model._replace(local=own.local) if placed else weights.model,
        merged,
        precision=weights.precision,
        version=weights.version,
        max_batch=needs.max_batch,
        layout=own if placed else None,
        record_experts=needs.record_experts,
        record_kept=needs.record_kept,
    )
    numbers: dict[str, float] = {}
    if several and not config.devices:
        moved = collectives(sampler.transfer_hlo(merged))
        numbers["publish/bytes_sent"] = sum(traffic.sent for traffic in moved.values())

    def publish(params: Params, *, version: int) -> dict[str, float]:
        sampler.load(lora.merge(params), version=version)
        return numbers

    used: Sampler = sampler
    if config.devices:
        used = OneAtATime(sampler, own.mesh.devices.flat[0])
    cuts = {axis: size for axis, size in own.mesh.shape.items() if size > 1 and axis != "data"}
    facts = {"sampler": "embedded", "sampler.mesh": str(cuts or "whole")}
    return Serving(used, publish, facts=lambda: facts)
