"""Servers read exactly the learner's tensors from a publisher, bit for bit."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jaxrl import huggingface
from jaxrl.bridge import manifest, payload, source
from jaxrl.bridge.base import PoisonedError, RefusedError, UnavailableError
from jaxrl.bridge.exchange import Form
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.shared_memory import SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.models import spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.model import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.traffic import collectives
from tests.bridge.cases import (
    EXPERTS,
    FAMILIES,
    GPT_OSS,
    QWEN3,
    ListSource,
    Recorder,
    params,
    read_payload,
    write_payload,
)

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)
SPECS = decoder(QWEN3).specs


def exported(config, tree, directory: Path, dtype: np.dtype) -> dict[str, bytes]:
    """Returns the same tensors by another path: checkpoint export and the safetensors library."""
    huggingface.save(directory, tree, config, dtype=dtype)
    return {k: v.tobytes() for k, v in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("wire", [F32, BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("config", [*FAMILIES.values(), EXPERTS, GPT_OSS])
def test_source_equals_the_exported_checkpoint(
    tmp_path: Path, config: DecoderConfig, wire: np.dtype
) -> None:
    tree = params(config, 0)
    tensors = ParamsSource(tree, decoder(config).specs, dtype=wire)
    found = {name: array.tobytes() for name, array in tensors}
    assert found == exported(config, tree, tmp_path / "model", wire)
    assert [one.name for one in tensors.specs()] == list(found)


@pytest.mark.parametrize("config", [QWEN3, EXPERTS, GPT_OSS])
def test_devices_of_a_mesh_send_nothing_to_each_other(config: DecoderConfig) -> None:
    tree, specs = params(config, 0), decoder(config).specs
    mesh = make_mesh(fsdp=4, tensor=2)

    def put(x: jax.Array) -> jax.Array:
        cut = None if x.shape[-1] % 8 else ("fsdp", "tensor")
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), cut)))

    spread = jax.tree.map(put, tree)
    whole = {name: array.tobytes() for name, array in ParamsSource(tree, specs, dtype=BF16)}
    for other in (spread, jax.device_get(tree)):  # or on the host
        found = {name: array.tobytes() for name, array in ParamsSource(other, specs, dtype=BF16)}
        assert found == whole
    arrays = spec.flatten(spread)
    for path, part in spec.flatten(specs).items():
        convert = source._converter(Form(bool(part.stacked), part.transposed, BF16))
        assert collectives(convert.lower(arrays[path], 0).compile().as_text() or "") == {}


def test_source_refuses_unexpected_parameters() -> None:
    tree = params(QWEN3, 0)
    del tree["final_norm"]
    with pytest.raises(ValueError, match="final_norm"):
        ParamsSource(tree, SPECS, dtype=F32)


def test_shared_memory_publishes_every_version(tmp_path: Path) -> None:
    server = Recorder()
    with SharedMemoryPublisher([server], wire=BF16, sampler=BF16, memory=tmp_path) as publisher:
        assert server.dtypes == ("bfloat16", "bfloat16", "float32")
        used = set()
        for version in range(4):
            source = ParamsSource(params(QWEN3, version), SPECS, dtype=BF16)
            timings = publisher.publish(source, version=version)
            assert server.tensors == {name: array.tobytes() for name, array in source}
            assert server.version == version
            assert timings.write > 0
            assert timings.load == 1.0
            files = [path for path in server.root.rglob("*.safetensors")]
            used.update((path, path.stat().st_ino) for path in files)
        assert len(used) == 2  # two files, reused
    assert not list(tmp_path.iterdir())


def test_shared_memory_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SharedMemoryPublisher(
            [Recorder()], wire=F32, sampler=F32, memory=tmp_path
        ) as publisher:
            publisher.publish(ListSource({"a": np.zeros(3, np.float32)}), version=0)
            (top,) = tmp_path.iterdir()
            assert top.stat().st_mode & 0o077 == 0
            files = [path for path in top.rglob("*") if path.is_file()]
            assert {path.name for path in files} >= {"manifest.json", "model.safetensors"}
            assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    finally:
        os.umask(before)


def test_interrupted_write_leaves_no_manifest(tmp_path: Path) -> None:
    class Killed(ListSource):
        def __iter__(self):
            for item in self.tensors.items():
                yield item
                raise KeyboardInterrupt

    server = Recorder()
    source = ListSource({name: np.zeros(3, np.float32) for name in "ab"})
    with SharedMemoryPublisher([server], wire=F32, sampler=F32, memory=tmp_path) as publisher:
        for version in range(3):
            publisher.publish(source, version=version)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(Killed(source.tensors), version=3)
        (left,) = server.root.glob(f"*/{manifest.FILE}")
        assert manifest.read(left.parent).version == 2  # in service


def test_a_source_must_follow_its_specs(tmp_path: Path) -> None:
    class Liar(ListSource):
        def __iter__(self):
            yield "a", np.zeros(4, np.float32)

    with (
        SharedMemoryPublisher([Recorder()], wire=F32, sampler=F32, memory=tmp_path) as publisher,
        pytest.raises(ValueError, match=r"announced .*yielded a float32"),
    ):
        publisher.publish(Liar({"a": np.zeros(3, np.float32)}), version=0)


def test_worst_failure_is_raised(tmp_path: Path) -> None:
    servers = [Recorder(), Recorder(), Recorder()]
    failures = [RefusedError("no"), PoisonedError("half"), UnavailableError("nobody there")]
    source = ListSource({"a": np.zeros(3, np.float32)})
    with SharedMemoryPublisher(servers, wire=F32, sampler=F32, memory=tmp_path) as publisher:
        for server, failure in zip(servers, failures, strict=True):
            server.failure = failure
        with pytest.raises(PoisonedError, match="half"):
            publisher.publish(source, version=0)
        servers[1].failure = UnavailableError("ill")
        with pytest.raises(RefusedError, match="no"):
            publisher.publish(source, version=0)
        for kind in failures:  # one successful server is enough
            servers[1].failure, servers[2].failure = kind, None
            publisher.publish(source, version=1)
            assert [server.version for server in servers] == [-1, -1, 1]


def test_unavailable_servers_are_skipped(tmp_path: Path) -> None:
    servers = [Recorder(), Recorder()]
    source = ListSource({"a": np.zeros(3, np.float32)})
    with SharedMemoryPublisher(servers, wire=F32, sampler=F32, memory=tmp_path) as publisher:
        servers[0].failure = UnavailableError("nobody there")
        assert publisher.publish(source, version=0).load == 1.0
        assert [server.version for server in servers] == [-1, 0]
        servers[1].failure = UnavailableError("gone, too")
        with pytest.raises(UnavailableError, match="nobody there"):
            publisher.publish(source, version=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Makes a root with the payload `p`."""
    (tmp_path / "root").mkdir()
    source = ListSource({"a": np.arange(300, dtype=np.float32), "b": np.ones(2, np.float32)})
    write_payload(source, tmp_path / "root" / "p", version=1)
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["..", ".", "p/..", "../root", "/tmp", "q", "p/manifest.json"])
def test_payloads_stay_below_the_root(root: Path, name: str) -> None:
    read_payload(root, "p")
    (root / "q").symlink_to(root.parent)
    with pytest.raises(ManifestError, match="root"):
        payload.resolve(root, name)


def test_a_short_file_is_detected(root: Path) -> None:
    file = root / "p" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ManifestError, match=r"b: needs 8 bytes"):
        read_payload(root, "p")


def test_a_linked_file_is_refused(root: Path) -> None:
    file = root / "p" / "model.safetensors"
    file.rename(root.parent / "elsewhere")
    file.symlink_to(root.parent / "elsewhere")
    with pytest.raises(ManifestError, match="cannot be mapped"):
        read_payload(root, "p")


def test_an_unfinished_payload_has_no_manifest(root: Path) -> None:
    (root / "p" / manifest.FILE).unlink()
    with pytest.raises(ManifestError, match="cannot be read"):
        read_payload(root, "p")
