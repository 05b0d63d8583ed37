"""Publishes a learner's weights, or its adapters, to vLLM servers as a config says."""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from jaxrl.bridge import (
    MEMORY,
    TAKE_OVER,
    AdapterPublisher,
    Delivery,
    LearnerIdentity,
    OwnedDirectory,
    ParamsSource,
    PublishBase,
    SharedMemoryPublisher,
    Store,
    StoreFollower,
    StorePublisher,
    Timings,
    UnavailableError,
    Upload,
    VllmServer,
    bring,
    directory_of,
    in_place,
    known_key,
    new_learner,
)
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core import Hosts, Precision
from jaxrl.fleet.addresses import Addresses
from jaxrl.huggingface import Checkpoint
from jaxrl.models import Model, Params, lora
from jaxrl.sampling import VllmSampler
from jaxrl.tracking.tracker import read_metrics

Publish = Callable[..., dict[str, float]]
"""(params, version=...) -> metrics, such as seconds, once all sampling uses `params`."""


class Adapters(NamedTuple):
    """Adapters that servers receive without the base weights."""

    specs: lora.Adapted  # of the adapters and of the model
    keep: int  # number of versions that requests may still name


class WeightRoute(NamedTuple):
    """The weights that a sampler starts with."""

    model: Model  # the decoder that they belong to
    params: Any  # the learner's parameters: the model's, or lora.Adapted
    version: int  # their policy version
    precision: Precision  # the dtypes that they are sent and used in
    checkpoint: Checkpoint  # has the model's config and tokenizer


class Sync(NamedTuple):
    """The learner's end of a weight sync."""

    config: SamplerConfig  # names the store and the treatment of requests in flight
    weights: WeightRoute  # the first that are sent
    learner: LearnerIdentity  # the identity of the run
    hosts: Hosts  # the learner's processes

    def source(self, params: Any) -> ParamsSource:
        """Returns the tensors that this process publishes: all, or its share with a store."""
        return ParamsSource(
            lora.merge(params),
            self.weights.model.specs,
            dtype=self.weights.precision.wire,
            processes=1 if self.config.store is None else self.hosts.count,
        )

    def publisher(self, servers: Sequence[VllmServer]) -> SharedMemoryPublisher | StorePublisher:
        """Connects to the servers; returns a publisher of whole weights."""
        shared: dict[str, Any] = {
            "wire": self.weights.precision.wire,
            "sampler": self.weights.precision.sampler,
            "logits": self.weights.precision.logits,
            "blocks": self.weights.precision.blocks,
            "in_flight": self.config.in_flight,
            "learner": self.learner,
        }
        if self.config.store is None:
            return SharedMemoryPublisher(servers, **shared)
        store = Store(self.config.store, known_key())
        return StorePublisher(servers, store, hosts=self.hosts, **shared)


def run_learner(directory: Path) -> LearnerIdentity:
    """Returns the identity of a run's learner, with the same name when the run resumes, and a later
    session than at its starts before, even if the clock has stepped back. The environment variable
    JAXRL_TAKE_OVER names a learner to replace.

    Raises:
      ValueError: if the directory's path cannot be part of a name.
    """
    name = f"{directory.resolve()} on {socket.gethostname()}"
    starts = [e.get("time", 0.0) for e in read_metrics(directory / "starts.jsonl")]
    begun = round(max(starts) * 1e9) + len(starts) if starts else None
    try:
        return new_learner(name, replaces=os.environ.get(TAKE_OVER, ""), begun=begun)
    except ValueError as error:
        raise ValueError(
            f"run_dir = {str(directory)!r:.300}: servers know a run by its directory, and {error}; "
            "choose another directory"
        ) from error


class Send(NamedTuple):
    """The way of weights to the servers."""

    # (params, version=...) -> the adapter that requests must name, and seconds, once all reachable
    # servers have the parameters
    publish: Callable[..., tuple[str | None, Timings]]
    use: Callable[[Sequence[VllmServer]], None]  # sends to these servers from now on


@contextmanager
def open_send(
    sync: Sync,
    servers: Sequence[VllmServer],
    *,
    adapters: Adapters | None,
    check: PublishBase | None = None,
) -> Iterator[Send]:
    """Yields the way of whole weights, or of the adapters alone, to the servers. After the block
    other learners may connect. Processes other than 0 use `follower`.

    `check` is given for servers without jaxrl's engine, in place of publishing their base.

    Raises:
      ValueError: if such servers cannot read the store.
    """
    with ExitStack() as stack:
        used = [*servers]

        def disconnect() -> None:
            for server in used:
                server.disconnect()

        stack.callback(disconnect)
        if adapters is not None:
            opened = _open_adapters(sync, servers, adapters=adapters, check=check)
            of_adapters = stack.enter_context(opened)
            follow, publish = of_adapters.use, of_adapters.publish
        else:
            publisher = stack.enter_context(sync.publisher(servers))
            follow = publisher.use

            def publish(params: Any, *, version: int) -> tuple[None, Timings]:
                return None, publisher.publish(sync.source(params), version=version)

        def use(now: Sequence[VllmServer]) -> None:
            used[:] = now
            follow(now)

        yield Send(publish, use)


@contextmanager
def _open_adapters(
    sync: Sync, servers: Sequence[VllmServer], *, adapters: Adapters, check: PublishBase | None
) -> Iterator[AdapterPublisher]:
    """Opens a publisher of adapters; arguments and errors as in `open_send`."""
    wire = sync.weights.precision.wire
    parent, store = MEMORY, None
    if sync.config.store is not None:
        store = Store(sync.config.store, known_key())
    if store is not None and check is not None:
        store.make()
        parent = directory_of(store.url)
        if parent is None:
            raise ValueError(
                f"sampler.store = {store.url!r}: servers without jaxrl's engine read adapters from "
                "a directory; give one that they have under the same path, file://..."
            )

    def publish_base(servers: Sequence[VllmServer], base: Params, version: int) -> None:
        # The base is published once in a run, so its publisher is not kept open.
        with sync.publisher(servers) as publisher:
            publisher.publish(
                ParamsSource(base, adapters.specs.frozen, dtype=wire), version=version
            )

    with ExitStack() as stack:
        owned = stack.enter_context(OwnedDirectory(parent))
        delivery = in_place(owned.path)
        if store is not None and check is None:
            upload = Upload(
                store,
                learner=sync.learner,
                group="adapters",
                slots=adapters.keep + 1,  # the next one is loaded before the oldest goes
            )
            stack.callback(upload.close)
            delivery = through_store(upload, owned.path, word=wire.itemsize)
        publisher = AdapterPublisher(
            servers,
            delivery,
            specs=adapters.specs,
            base=str(sync.weights.checkpoint.directory),
            wire=wire,
            publish_base=check or publish_base,
            learner=sync.learner,
            keep=adapters.keep,
        )
        yield stack.enter_context(publisher)


def follower(sync: Sync) -> Publish:
    """Returns the publish function of processes other than 0: they help to gather the tensors, and
    with a store each writes its share."""
    share = None
    if sync.config.store is not None:
        store = Store(sync.config.store, known_key())
        wire = sync.weights.precision.wire
        share = StoreFollower(store, wire=wire, learner=sync.learner, hosts=sync.hosts)

    def follow(params: Params, *, version: int) -> dict[str, float]:
        del version
        source = sync.source(params)
        if share is None:
            deque(source, maxlen=0)
        else:
            share.publish(source)
        return {}

    return follow


def through_store(upload: Upload, root: Path, *, word: int) -> Delivery:
    """Returns the delivery through a store of directories below a root. Versions before the last
    come from what a host still has."""
    last = 0

    def send(directory: Path, version: int) -> Callable[[VllmServer], PurePath]:
        nonlocal last
        files = {path.name: np.fromfile(path, np.uint8) for path in directory.iterdir()}
        request = upload.write(files, number=version, word=word)
        last = version

        def place(server: VllmServer) -> PurePath:
            if version == last:
                return bring(server, upload, request)
            if (found := server.fetch(request)) is None:
                raise UnavailableError(f"{server.url}: its host no longer has version {version}")
            return found

        return place

    return Delivery(root, send)


Listed = Callable[[], Addresses | None]
"""The servers that there are now; None if they do not change."""


class PublishToServers:
    """Publishes weights to servers, and tells the client which servers have them.

    The servers may change between two publishes: a new one gets the weights before requests, and
    one that has left finishes the requests that it has.
    """

    def __init__(
        self,
        send: Send,
        servers: Sequence[VllmServer],
        *,
        client: VllmSampler,
        note: Callable[[str], None],
        learner: LearnerIdentity,
        listed: Listed = lambda: None,
        connect: Callable[[str], VllmServer] = VllmServer,
    ) -> None:
        """`connect` makes the client of a server that `listed` names for the first time."""
        self._session, self._listed, self._connect = learner.session, listed, connect
        self._send, self._servers, self._client, self._note = send, servers, client, note
        self._missed = dict.fromkeys((server.url for server in servers), 0)  # versions in turn
        self._left: Sequence[str] = ()
        self._noted: set[str] = set()

    def __call__(self, params: Any, *, version: int) -> dict[str, float]:
        """Publishes weights; a server that failed gets them at a later publish."""
        self._follow()
        adapter, timings = self._send.publish(params, version=version)
        before = self._missed
        self._missed = {
            server.url: 0 if server.connected else before[server.url] + 1
            for server in self._servers
        }
        self._report(before, version)
        self._client.use_version(
            version,
            urls=sorted(url for url, missed in self._missed.items() if not missed),
            left=self._left,
            adapter=adapter,
            session=self._session,
        )
        seconds = {f"time/publish/{name}": s for name, s in timings._asdict().items()}
        return seconds | {
            "sampler/servers": float(sum(not missed for missed in self._missed.values())),
            "sampler/versions_behind": float(max(self._missed.values())),
        }

    def _follow(self) -> None:
        """Takes in the servers that are new, and lets go of those that are no longer there."""
        known, listed = {server.url: server for server in self._servers}, self._listed()
        if listed is None or not (urls := listed.present):
            return
        self._left = listed.leaving
        if set(urls) == known.keys():
            return
        for url in known.keys() - set(urls):
            self._note(f"{url} leaves: it finishes its requests and gets no more")
        for url in set(urls) - known.keys():
            self._note(f"{url} is new and gets the present weights")
        self._servers = [known.get(url) or self._connect(url) for url in urls]
        self._missed = {url: self._missed.get(url, 0) for url in urls}
        self._send.use(self._servers)

    def _report(self, before: Mapping[str, int], version: int) -> None:
        """Writes a line for each server that has fallen behind, or is back."""
        for server in self._servers:
            missed, now = before[server.url], self._missed[server.url]
            if now and not missed:
                self._note(
                    f"{server.url} is behind by 1 version; continuing with the other servers, "
                    f"retrying at each publish: {server.last_error}"
                )
            elif missed and not now:
                count = f"{missed} version{'s' * (missed > 1)}"
                self._note(f"{server.url} is back and serves version {version}; it missed {count}")
            if (line := server.untried) is not None and line not in self._noted:
                self._note(line)
                self._noted.add(line)
