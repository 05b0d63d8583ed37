"""One of several processes; run by test_hosts.py.

usage: python -m tests.training.hosts_child NAME ADDRESS COUNT INDEX DIRECTORY

NAME is one of the functions.
"""

import functools
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES

from jaxrl import huggingface
from jaxrl.bridge.base import UnavailableError, new_learner
from jaxrl.bridge.source import ParamsSource
from jaxrl.bridge.store.objects import Store
from jaxrl.bridge.store.publisher import StoreFollower, StorePublisher
from jaxrl.builders.model import find_trained, load_trained, trained_specs
from jaxrl.builders.same_files import check_same_functions
from jaxrl.config.hosts import HostsConfig
from jaxrl.config.training import Config
from jaxrl.core.hosts import Hosts
from jaxrl.core.precision import PRESETS
from jaxrl.learner import digests
from jaxrl.learner.checkpoints import CheckpointError, Checkpoints
from jaxrl.models.model import decoder
from jaxrl.models.spec import Params, Specs, flatten, parameter_count
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from jaxrl.sharding.transfer import fetch, place
from jaxrl.training import cluster
from jaxrl.training.cluster import joined
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.run_directory import lock
from tests import tiny
from tests.bridge.store.hosts import host
from tests.run_config import run_config

DIRECTORY = Path(sys.argv[-1])


def whole(hosts: Hosts) -> None:
    seen: list[tuple[int, int]] = []

    def add(a: int, *, b: int) -> int:
        seen.append((a, b))
        return a + b

    together = hosts.on_all(add)
    assert hosts.on_leader(lambda: together(1, b=2) + together(3, b=4) + 10 * hosts.index) == 10
    assert seen == [(1, 2), (3, 4)]
    large = np.arange(5000)
    np.testing.assert_array_equal(hosts.share(large if hosts.leads else None), large)
    assert hosts.largest(hosts.index) == hosts.count - 1
    read: list[int] = []
    total = hosts.consume_on_leader((read.append(i) or i for i in range(5)), sum)
    assert read == list(range(5))
    assert total == (10 if hosts.leads else None)

    layout = Layout(make_mesh(fsdp=-1), RULES["fsdp"])
    model, params = decoder(tiny.CONFIG), jax.device_get(tiny.params())
    cut = place(params, layout.tree(model.specs))
    assert not cut["layers"]["q"].is_fully_addressable
    jax.tree.map(np.testing.assert_array_equal, fetch(cut), params)
    _exchanged(hosts, cut, model.specs)
    _compared(hosts)
    print("whole", flush=True)
    while True:  # until one of them is stopped
        hosts.share(0)
        time.sleep(0.1)


def _exchanged(hosts: Hosts, cut: Params, specs: Specs) -> None:
    """Process 0 gets the tensors that one process would publish; no device holds more than its part
    of three at a time."""
    wire = PRESETS["bf16"].wire
    wanted = {k: x.tobytes() for k, x in _published(tiny.params(), specs, dtype=wire)}
    found = dict[str, bytes]()
    largest = max(math.prod(one.tensor_shape) for one in flatten(specs).values())
    for name, tensor in ParamsSource(cut, specs, dtype=wire):
        found[name] = tensor.tobytes()
        held = _sizes(np.uint16)
        assert sum(held) <= 3 * largest, held
        assert max(held, default=0) <= largest / jax.local_device_count(), held
    assert found == (wanted if hosts.leads else {})


def _compared(hosts: Hosts) -> None:
    """Process 2 reads another model, other adapters or another loss than the others, under the same
    names and of the same shapes."""
    layout = Layout(make_mesh(fsdp=-1), RULES["fsdp"])
    files = {
        "models": "model.safetensors",
        "adapters": "adapter_model.safetensors",
        "files of loss.name": "loss.py",
    }
    for odd in (None, *files):
        directory = DIRECTORY / f"{files.get(odd or '')}-{hosts.index}"
        config = _written(directory, [int(hosts.index == 2 and name == odd) for name in files])
        said = f"0 and 2 read different {odd}: {files.get(odd or '')} is another one in .*-2 of "
        with nullcontext() if odd is None else pytest.raises(ValueError, match=said):
            load_trained(config, find_trained(config), layout=layout)
            check_same_functions({"loss.name": config.loss.name}, hosts)


def _written(directory: Path, seeds: list[int]) -> Config:
    """Writes a model, adapters and a loss; returns a config that names them."""
    keys = {"lora.rank": 2, "lora.path": directory, "loss.name": f"{directory}/loss.py:own"}
    config = run_config(directory, **{**keys, "model.path": directory})
    model, adapters, loss = seeds
    wire = PRESETS["fp32"].wire
    huggingface.save(directory, tiny.params(model), tiny.CONFIG, dtype=wire)
    specs = trained_specs(config.lora, decoder(tiny.CONFIG).specs)
    drawn = tiny.drawn(specs.adapters, adapters)
    huggingface.save_adapter(directory, drawn, specs=specs, base="model", dtype=wire)
    (directory / "loss.py").write_text(f"def own(): ...  # {loss}")
    return config


def _sizes(dtype: Any) -> list[int]:
    """Returns the sizes of this process's buffers on devices, each once, and keeps none alive."""
    arrays = (x for x in jax.live_arrays() if x.dtype == dtype)
    parts = (shard.data for x in arrays for shard in x.addressable_shards)
    return [*{part.unsafe_buffer_pointer(): part.size for part in parts}.values()]


def _published(params: Params, specs: Specs, *, dtype: np.dtype) -> Iterator[tuple[str, Any]]:
    """Yields each tensor by the formula: the layer's part of the parameter, cast."""
    for path, part in flatten(specs).items():
        array = functools.reduce(lambda tree, key: tree[key], path.split("/"), params)
        tensors = np.asarray(array).reshape(-1, *part.shape[part.stacked :])
        yield from zip(part.hf_names(), part.swap(tensors).astype(dtype), strict=True)


def stored(hosts: Hosts) -> None:
    """Publishes versions of a model that is cut over all devices. One host lacks the base of the
    third, and needs it whole."""
    layout = Layout(make_mesh(fsdp=-1), RULES["fsdp"])
    specs, wire = decoder(tiny.CONFIG).specs, PRESETS["bf16"].wire
    common = {"wire": wire, "learner": hosts.share(new_learner()), "hosts": hosts}
    store = Store((DIRECTORY / "store").as_uri(), None)

    def params(version: int) -> Params:
        return jax.tree.map(lambda x: np.asarray(x) * np.float32(1 + version / 64), tiny.params())

    def source(version: int) -> ParamsSource:
        cut = place(params(version), layout.tree(specs))
        return ParamsSource(cut, specs, dtype=wire, processes=hosts.count)

    def numbers(found: ParamsSource) -> int:
        return sum(math.prod(spec.shape) for spec in found.specs())

    assert numbers(source(0)) < 0.6 * parameter_count(specs)
    if not hosts.leads:
        follower = StoreFollower(store, **common)
        for version in range(4):
            follower.publish(source(version))
    else:
        servers = [*host(DIRECTORY / "a"), *host(DIRECTORY / "b")]
        with StorePublisher(servers, store, sampler=wire, **common) as publisher:
            for version in range(4):
                servers[1].failure = UnavailableError("not yet") if version == 1 else None
                publisher.publish(source(version), version=version)
                whole = ParamsSource(jax.device_put(params(version)), specs, dtype=wire)
                for server in servers[: 1 if version == 1 else 2]:
                    assert server.tensors == {name: array.tobytes() for name, array in whole}
        assert [server.whole for server in servers] == [0, 1]
        assert not [path for path in (DIRECTORY / "store").rglob("*") if path.is_file()]
    print("stored", flush=True)


def failing(hosts: Hosts) -> None:
    def read() -> None:
        raise ValueError("nothing to read")

    with hosts.reporting():
        hosts.on_leader(read)


def interrupted(hosts: Hosts) -> None:
    with Interrupt(), hosts.reporting():
        while True:
            hosts.share(0)
            if not hosts.leads:
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)


def apart(hosts: Hosts) -> None:
    with lock(DIRECTORY / f"disk_of_{hosts.index}" / "run", hosts):
        raise AssertionError("a checkpoint of this run would never be complete")


def damaged(hosts: Hosts) -> None:
    """Restores checkpoints: one that is whole, one with a wrong digest, one with a torn file that
    one process reads."""
    layout = Layout(make_mesh(fsdp=-1), RULES["fsdp"])
    shapes = {"cut": ((512, 256), ("vocab", "embed")), "whole": ((8, 4), ("layers", "norm"))}
    state = {
        name: place(
            np.random.default_rng(0).normal(size=shape).astype(np.float32), layout.sharding(axes)
        )
        for name, (shape, axes) in shapes.items()
    }
    assert not state["cut"].is_fully_addressable
    checkpoints = Checkpoints(DIRECTORY / "checkpoints", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state, host={})
    checkpoints.wait()
    found = checkpoints.restore(1, state).state
    np.testing.assert_array_equal(fetch(found["cut"]), fetch(state["cut"]))

    def damage() -> None:
        path = DIRECTORY / "checkpoints" / "2" / "host" / "metadata"
        arrays = json.loads(path.read_text())["arrays"]["state"]
        arrays["cut"] = arrays["whole"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(digests, "tree_digests", lambda _: arrays)
            path.write_text(json.dumps(digests.seal({}, {"state": state})))
        files = (DIRECTORY / "checkpoints" / "3" / "state" / "ocdbt.process_1").rglob("d/*")
        for path in files:
            path.write_bytes(b"")

    hosts.on_leader(damage)
    with pytest.raises(CheckpointError, match="2 is damaged: the array state/cut is not what was"):
        checkpoints.restore(2, state)
    print("damaged", flush=True)
    with hosts.reporting():
        checkpoints.restore(3, state)


def alone(hosts: Hosts) -> None:
    raise AssertionError("the other process joins another address")


def devices(hosts: Hosts) -> None:
    visible = CUDA_VISIBLE_DEVICES.value
    print(f"{hosts.index} of {hosts.count} has the GPUs: {visible}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored
    name, address, count, index = sys.argv[1:-1]
    numbers = {} if address == "auto" else {"processes": int(count), "process": int(index)}
    cluster.HEARTBEAT = 15  # shorter than a run's, longer than a loaded machine holds a thread up
    if name == "alone":
        cluster.JOIN = 1
    with joined(HostsConfig(coordinator=address, **numbers)):
        cases = (whole, stored, failing, interrupted, apart, damaged, alone, devices)
        {f.__name__: f for f in cases}[name](Hosts())
