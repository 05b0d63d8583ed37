"""Servers read exactly the learner's tensors from a publisher, bit for bit."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jaxrl.bridge import manifest, payload, safetensors_file
from jaxrl.bridge.base import PoisonedError, RefusedError, UnavailableError
from jaxrl.bridge.directory import DirectoryPublisher, write_checkpoint
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.shared_memory import SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.models import huggingface
from jaxrl.models.decoder import decoder
from jaxrl.models.families import DecoderConfig
from sharding.mesh import make_mesh
from tests.bridge.cases import (
    EXPERTS,
    FAMILIES,
    LEARNER,
    QWEN3,
    ListSource,
    Recorder,
    params,
    read_payload,
)

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)
SPECS = decoder(QWEN3).specs


def exported(config, tree, directory: Path, dtype: np.dtype) -> dict[str, bytes]:
    """Returns the same tensors by another path: checkpoint export and the safetensors library."""
    huggingface.save(directory, tree, config, dtype=dtype)
    return {k: v.tobytes() for k, v in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("wire", [F32, BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("config", [*FAMILIES.values(), EXPERTS], ids=[*FAMILIES, "experts"])
def test_source_equals_the_exported_checkpoint(
    tmp_path: Path, config: DecoderConfig, wire: np.dtype
) -> None:
    tree = params(config, 0)
    source = ParamsSource(tree, decoder(config).specs, dtype=wire)
    found = {name: array.tobytes() for name, array in source}
    assert found == exported(config, tree, tmp_path / "model", wire)
    assert [spec.name for spec in source.specs()] == list(found)


@pytest.mark.parametrize("config", [QWEN3, EXPERTS], ids=["dense", "experts"])
def test_source_gathers_from_a_mesh(config: DecoderConfig) -> None:
    tree, specs = params(config, 0), decoder(config).specs
    mesh = make_mesh(fsdp=4, tensor=2)
    spread = jax.tree.map(
        lambda x: jax.device_put(
            x, NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), ("fsdp", "tensor")))
        ),
        tree,
    )
    whole = {name: array.tobytes() for name, array in ParamsSource(tree, specs, dtype=BF16)}
    gathered = {name: array.tobytes() for name, array in ParamsSource(spread, specs, dtype=BF16)}
    assert whole == gathered


def test_source_refuses_parameters_that_differ_from_the_specs() -> None:
    tree = params(QWEN3, 0)
    del tree["final_norm"]
    with pytest.raises(ValueError, match="final_norm"):
        ParamsSource(tree, SPECS, dtype=F32)


def test_shared_memory_publishes_every_version(tmp_path: Path) -> None:
    server = Recorder()
    with SharedMemoryPublisher([server], wire=BF16, sampler=BF16, memory=tmp_path) as publisher:
        assert server.dtypes == ("bfloat16", "bfloat16")
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


def test_shared_memory_is_read_by_its_user_only(tmp_path: Path) -> None:
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


def test_directory_publishes_checkpoints(tmp_path: Path) -> None:
    model_dir, server = tmp_path / "model", Recorder()
    tree = params(QWEN3, 0)
    expected = exported(QWEN3, tree, model_dir, F32)
    with DirectoryPublisher(
        [server], tmp_path / "root", model_dir=model_dir, wire=F32, sampler=F32
    ) as publisher:
        for version in range(3):
            publisher.publish(ParamsSource(tree, SPECS, dtype=F32), version=version)
            assert server.tensors == expected
    kept = {path.name for path in (tmp_path / "root").iterdir()}
    assert kept == {".jaxrl-lock", "version-1", "version-2"}
    config, loaded = huggingface.load(tmp_path / "root" / "version-2", dtype=F32)
    assert config == QWEN3
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)


def test_a_resumed_run_replaces_a_published_version(tmp_path: Path) -> None:
    model_dir, root = tmp_path / "model", tmp_path / "root"
    exported(QWEN3, params(QWEN3, 0), model_dir, F32)
    roles: Any = {"model_dir": model_dir, "wire": F32, "sampler": F32}
    with DirectoryPublisher([Recorder()], root, **roles) as first:
        for version in (1, 2):
            first.publish(ParamsSource(params(QWEN3, 0), SPECS, dtype=F32), version=version)
    other = params(QWEN3, 1)
    expected = exported(QWEN3, other, model_dir, F32)
    with DirectoryPublisher([server := Recorder()], root, **roles) as second:
        for version in (1, 2, 3):
            second.publish(ParamsSource(other, SPECS, dtype=F32), version=version)
            assert server.tensors == expected
    assert versions(root) == {"version-2", "version-3"}


def versions(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name.startswith("version-")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def publish_small(root: Path, model: Path, *numbers: int) -> None:
    with DirectoryPublisher(
        [Recorder()], root, model_dir=model, wire=F32, sampler=F32
    ) as publisher:
        for version in numbers:
            source = ListSource({"a": np.full(3, version, np.float32)})
            publisher.publish(source, version=version)


def test_foreign_directories_stay(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "root"
    foreign = [root / "version-best", root / "version-01", root / "version-", root / ".version-3"]
    for directory in foreign:
        directory.mkdir(parents=True)
        (directory / "notes").write_text("mine")
    (root / "version-x").write_text("mine")
    publish_small(root, model, 1, 2, 3, 4)
    assert all((directory / "notes").read_text() == "mine" for directory in foreign)
    assert versions(root) == {
        *("version-best", "version-01", "version-", "version-x", "version-3", "version-4")
    }


@pytest.mark.parametrize("kind", ["directory", "file", "link", "other version", "manifest"])
def test_a_foreign_version_is_an_error_before_anything_is_published(
    tmp_path: Path, model: Path, kind: str
) -> None:
    """It may be in the way of a later version, and is not ours to remove."""
    root = tmp_path / "root"
    publish_small(root, model, 1, 2)
    path = root / "version-9"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(root / "version-1")
    elif kind == "other version":
        shutil.copytree(root / "version-1", path)
    else:
        path.mkdir()
        (path / ("manifest.json" if kind == "manifest" else "notes")).write_text('{"mine": 1}')
    with pytest.raises(FileExistsError, match="version-9 was not published by a learner"):
        publish_small(root, model, 3)
    assert versions(root) == {"version-1", "version-2", "version-9"}


def test_two_learners_do_not_share_a_directory(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "root"
    with (
        DirectoryPublisher([], root, model_dir=model, wire=F32, sampler=F32),
        pytest.raises(FileExistsError, match=r"another learner publishes to .*root; "),
    ):
        publish_small(root, model, 1)
    publish_small(root, model, 1)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jaxrl.bridge.directory import DirectoryPublisher
from tests.bridge.cases import ListSource, Recorder

class Dies(ListSource):
    def __iter__(self):
        yield "a", np.zeros(3, np.float32)
        os.kill(os.getpid(), signal.SIGKILL)

f32 = np.dtype("float32")
root, model = map(Path, sys.argv[1:])
publisher = DirectoryPublisher([Recorder()], root, model_dir=model, wire=f32, sampler=f32)
publisher.publish(Dies({"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}), version=3)
"""


def test_the_draft_of_a_killed_learner_is_removed(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "root"
    publish_small(root, model, 1, 2)
    command = [sys.executable, "-c", KILLED, str(root), str(model)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [path for path in root.rglob("model.safetensors") if "version" not in path.parent.name]
    assert versions(root) == {"version-1", "version-2"}
    publish_small(root, model, 3)
    assert {path.name for path in root.iterdir()} == {".jaxrl-lock", "version-2", "version-3"}


@pytest.mark.parametrize("moment", ["rename", "rmtree"])
def test_killed_while_a_version_is_replaced(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Each version is whole or absent, whatever the moment."""
    root = tmp_path / "root"
    publish_small(root, model, 1, 2)

    class KilledError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(*{"rename": (Path, "rename"), "rmtree": (shutil, "rmtree")}[moment], killed)
        with pytest.raises(KilledError):
            publish_small(root, model, 2)
    for name in versions(root):
        assert read_payload(root, name)
    publish_small(root, model, 2, 3)
    assert {path.name for path in root.iterdir()} == {".jaxrl-lock", "version-2", "version-3"}


def test_a_version_that_its_user_removed_is_no_error(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "root"
    with DirectoryPublisher(
        [Recorder()], root, model_dir=model, wire=F32, sampler=F32
    ) as publisher:
        for version in range(4):
            publisher.publish(ListSource({"a": np.zeros(3, np.float32)}), version=version)
            shutil.rmtree(root / "version-0", ignore_errors=True)
    assert versions(root) == {"version-2", "version-3"}


def test_checkpoints_have_several_files_and_leave_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl.bridge.directory._MAX_FILE_BYTES", 50_000)
    tree = params(QWEN3, 0)
    huggingface.save(tmp_path / "model", tree, QWEN3, dtype=F32)
    source = ParamsSource(tree, SPECS, dtype=F32)
    write_checkpoint(
        source, tmp_path / "a", version=3, learner=LEARNER, model_dir=tmp_path / "model"
    )
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    _, loaded = huggingface.load(tmp_path / "a", dtype=F32)
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)
    assert set(safetensors_file.read_specs(tmp_path / "a")) == set(source.specs())

    class Broken(ListSource):
        def __iter__(self):
            raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write_checkpoint(
            Broken({"a": np.zeros(3, np.float32)}),
            tmp_path / "b",
            version=4,
            learner=LEARNER,
            model_dir=tmp_path / "model",
        )
    assert {path.name for path in tmp_path.iterdir()} == {"a", "model"}


def test_a_source_must_follow_its_specs(tmp_path: Path) -> None:
    class Liar(ListSource):
        def __iter__(self):
            yield "a", np.zeros(4, np.float32)

    with (
        SharedMemoryPublisher([Recorder()], wire=F32, sampler=F32, memory=tmp_path) as publisher,
        pytest.raises(ValueError, match=r"announced .*yielded a float32"),
    ):
        publisher.publish(Liar({"a": np.zeros(3, np.float32)}), version=0)


def test_the_worst_failure_is_raised_if_no_server_takes_the_version(tmp_path: Path) -> None:
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
    (tmp_path / "model").mkdir()
    (tmp_path / "root").mkdir()
    source = ListSource({"a": np.arange(300, dtype=np.float32), "b": np.ones(2, np.float32)})
    write_checkpoint(
        source, tmp_path / "root" / "p", version=1, learner=LEARNER, model_dir=tmp_path / "model"
    )
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["..", ".", "p/..", "../model", "/tmp", "q", "p/manifest.json"])
def test_payloads_stay_below_the_root(root: Path, name: str) -> None:
    read_payload(root, "p")
    (root / "q").symlink_to(root.parent / "model")
    with pytest.raises(ManifestError, match="root"):
        payload.resolve(root, name)


def test_a_changed_byte_is_detected(root: Path) -> None:
    file = root / "p" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ManifestError, match="b: checksum"):
        read_payload(root, "p")


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
