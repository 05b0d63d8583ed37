"""Versions travel through a store exactly, and as little of them as can be."""

import contextlib
import os
import threading
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxrl.bridge import manifest
from jaxrl.bridge.base import LearnerIdentity, UnavailableError, new_learner
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.store import agent, delta, version
from jaxrl.bridge.store.objects import Objects, Store, StoreError
from jaxrl.bridge.store.publisher import StorePublisher, bring
from jaxrl.bridge.store.upload import Upload
from jaxrl.builders.weight_sync import through_store
from tests.bridge.cases import LEARNER, ListSource
from tests.bridge.store.hosts import HostedRecorder, host

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
MB = 1 << 20


@given(st.binary(max_size=200), st.integers(0, 2**32), st.sampled_from([2, 4]))
def test_a_difference_restores_the_chunk(text: bytes, seed: int, word: int) -> None:
    new = np.frombuffer(text, np.uint8)
    base = np.random.default_rng(seed).integers(0, 256, new.size, np.uint8)
    out = np.empty_like(new)
    delta.decode(delta.encode(new, base, word=word), base, out, word=word)
    assert out.tobytes() == text


def test_small_changes_make_small_differences() -> None:
    """As of a training step: the lowest bits of one word in fifty."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, MB // 2).astype(np.float16).view(np.uint16)
    new = base ^ (rng.random(base.size) < 0.02)
    assert len(delta.encode(new.view(np.uint8), base.view(np.uint8), word=2)) < MB // 40


def weights(seed: int, *, changed: float = 1.0) -> dict[str, np.ndarray]:
    """Makes 5.25 MB of tensors; of seeds above 0 a share differs from seed 0."""
    rng = np.random.default_rng(0)
    tensors = {
        "embedding": rng.normal(0, 1, (1024, 2048)).astype(F16),
        "norm": rng.normal(1, 0.1, 100).astype(F16),
        "head": rng.normal(0, 1, (640, 1024)).astype(F16),
    }
    other = np.random.default_rng(seed)
    for array in tensors.values() if seed else ():
        bits = array.reshape(-1).view(np.uint16)
        bits ^= other.random(bits.size) < changed
    return tensors


def test_servers_that_ask_together_share_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fetches at once would fill the same slot."""
    made, both = list[object](), threading.Barrier(2)

    class Slow(agent.Newest):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # another thread makes one meanwhile, if it may

    monkeypatch.setattr(agent, "Newest", Slow)
    servers = host(tmp_path / "a", servers=2)
    with publisher(servers, (tmp_path / "store").as_uri()) as learner:
        learner.publish(ListSource(weights(0)), version=0)
        for server in servers:
            check(server, weights(0))
    assert len(made) == 1


def check(server: HostedRecorder, tensors: dict[str, np.ndarray]) -> None:
    assert server.tensors == {name: array.tobytes() for name, array in tensors.items()}


def publisher(servers: Any, url: str, **options: Any) -> StorePublisher:
    return StorePublisher(servers, Store(url, "a key"), wire=F16, sampler=F16, **options)


def stored(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_only_what_changed_travels(tmp_path: Path) -> None:
    servers = [*host(tmp_path / "a", servers=2), *host(tmp_path / "b")]
    root = tmp_path / "a store"
    with publisher(servers, root.as_uri()) as learner:
        learner.publish(ListSource(weights(0)), version=0)
        whole = stored(root)
        assert whole > 5 * MB
        for number, changed in enumerate((0.01, 0.2, 0.0), start=1):
            before = stored(root)
            tensors = weights(1, changed=changed)
            learner.publish(ListSource(tensors), version=number)
            for server in servers:
                check(server, tensors)
                assert (server.version, server.whole) == (number, 0)
            if changed == 0.01:
                assert stored(root) - before < whole / 50
        one = weights(1, changed=0.0)
        one["norm"][0] += 1
        learner.publish(ListSource(one), version=9)
        check(servers[2], one)
        assert len({path.stat().st_ino for path in tmp_path.glob("a/*/slot-*/*.safetensors")}) == 2
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_host_without_base_gets_whole_chunks(tmp_path: Path) -> None:
    """One that joins late, that misses a version, or whose agent finds its slot changed."""
    (early,), root = host(tmp_path / "a"), tmp_path / "store"
    (late,) = host(tmp_path / "b")
    late.failure = UnavailableError("not yet")
    with publisher([early, late], root.as_uri()) as learner:
        for number in range(8):
            if number == 2:
                late.failure = None
            if number == 4:
                late.failure = UnavailableError("gone for one version")
            if number == 5:
                late.failure = None
            if number == 7:  # both slots
                for file in tmp_path.glob("b/*/slot-*/model.safetensors"):
                    with file.open("r+b") as stream:
                        stream.seek(3 * MB)
                        stream.write(b"damaged")
            tensors = weights(number, changed=0.1)
            learner.publish(ListSource(tensors), version=number)
            check(early, tensors)
            if late.failure is None:
                check(late, tensors)
                assert late.whole == {2: 1, 3: 1, 5: 2, 6: 2, 7: 3}[number]
            assert early.whole == 0


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
@pytest.mark.parametrize("kind", ["chunks", "deltas", "versions"])
def test_lost_and_damaged_objects_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lost: bool
) -> None:
    """Damaged on their way up, or deleted by a bucket's rule."""
    monkeypatch.setattr(agent, "_PAUSE", 0.0)
    (early,), root = host(tmp_path / "a"), tmp_path / "store"
    (late,) = host(tmp_path / "b")
    with publisher([early], root.as_uri()) as learner:
        learner.publish(ListSource(weights(0)), version=0)
        tensors = weights(1, changed=0.1)
        request = learner._write(ListSource(tensors), version=1)
        for path in root.rglob(f"{kind}/*"):
            path.unlink() if lost else path.write_bytes(path.read_bytes()[:-1] + b"?")
        for server in (early, late):
            server.connect(
                root="", wire="float16", sampler="float16", logits="float32", learner=early.learner
            )
            name = bring(server, learner._upload, request)
            server.update(f"{name.parent.name}/{name.name}", version=1, in_flight="keep")
            check(server, tensors)


def test_a_store_that_keeps_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_PAUSE", 0.0)
    (early,), (late,), root = host(tmp_path / "a"), host(tmp_path / "b"), tmp_path / "store"
    with publisher([early, late], root.as_uri()) as learner:
        learner.publish(ListSource(weights(0)), version=0)
        late.payloads.rename(tmp_path / "gone")
        late.payloads.mkdir()
        put = Objects.put
        monkeypatch.setattr(
            Objects, "put", lambda self, name, data: put(self, name, b"?" * len(data))
        )
        with pytest.raises(UnavailableError, match="does not keep what is written"):
            learner.publish(ListSource(weights(1)), version=1)
        monkeypatch.undo()
        learner.publish(ListSource(weights(2)), version=2)
        check(early, weights(2))
        check(late, weights(2))


def test_versions_are_ordered_without_a_clock(tmp_path: Path) -> None:
    """After the host's clock has stepped back, only differences travel, and the slot that servers
    read is never the one that is filled."""
    (server,), root = host(tmp_path / "a"), tmp_path / "store"
    with publisher([server], root.as_uri()) as learner:
        for number in range(5):
            learner.publish(ListSource(weights(number, changed=0.01)), version=number)
            for record in server.payloads.rglob(".stored"):
                assert record.stat().st_mtime < 1e6  # a count, not a time
            assert server.whole == 0


def test_new_agent_continues(tmp_path: Path) -> None:
    (server,) = host(tmp_path / "a")
    with publisher([server], (tmp_path / "store").as_uri()) as learner:
        for number in range(5):
            (new,) = host(tmp_path / "a")
            server.agent = new.agent
            tensors = weights(number, changed=0.1)
            learner.publish(ListSource(tensors), version=number)
            check(server, tensors)
            assert server.whole == 0


def test_unfilled_slot_has_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (server,) = host(tmp_path / "a")
    with publisher([server], (tmp_path / "store").as_uri()) as learner:
        for number in range(3):
            learner.publish(ListSource(weights(number, changed=0.1)), version=number)

        def killed(*_: Any, **__: Any) -> None:
            raise OSError("killed")

        monkeypatch.setattr(agent, "_rebuild", killed)
        with pytest.raises(UnavailableError, match="killed"):
            learner.publish(ListSource(weights(3, changed=0.1)), version=3)
        (left,) = tmp_path.glob(f"a/*/slot-*/{manifest.FILE}")
        assert manifest.read(left.parent).version == 2  # in service


def test_slots_of_learners_that_left_go(tmp_path: Path) -> None:
    servers = host(tmp_path / "a", servers=2)
    url = (tmp_path / "store").as_uri()
    count = lambda: len(list(tmp_path.glob("a/*/users")))  # noqa: E731
    with publisher(servers, url) as first:
        first.publish(ListSource(weights(0)), version=0)
        with publisher(servers[:1], url) as second:
            second.publish(ListSource(weights(0)), version=0)
            assert count() == 2
            for server in servers:
                server.connect(root="", wire="", sampler="", logits="", learner=second._learner)
            second._servers = servers
            second.publish(ListSource(weights(1)), version=1)
            assert count() == 1
    for server in servers:
        server.ask("{}")
    assert count() == 0


def test_what_a_killed_learner_left_goes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for learner in (new_learner("a run"), new_learner("another run")):
        killed = publisher(host(tmp_path / "a"), root.as_uri(), learner=learner)
        killed.publish(ListSource(weights(0)), version=0)
    before = stored(root)
    for run in root.iterdir():
        chunk = next(run.glob("*/chunks/*"))
        chunk.with_name(f"{chunk.name}#1").touch()  # an object that was being written
    with publisher(host(tmp_path / "a"), root.as_uri(), learner=new_learner("a run")):
        assert before / 2.1 < stored(root) < before / 1.9
        assert len(list(root.rglob("*#1"))) == 1


def test_adapters_travel_as_directories(tmp_path: Path) -> None:
    """vLLM may read an adapter again while requests name it: the last versions stay in place."""
    (server,) = host(tmp_path / "a")
    server.connect(root="", wire="", sampler="", logits="", learner=LEARNER)
    url = (tmp_path / "store").as_uri()
    upload = Upload(Store(url, None), learner=LEARNER, group="adapters", slots=3)
    delivery = through_store(upload, tmp_path, word=2)
    found: list[tuple[PurePath, int]] = []
    for number in range(5):
        directory = delivery.root / f"adapter-{number}"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(f'{{"rank": {number}}}')
        np.full(MB, number, np.float16).tofile(directory / "adapter_model.safetensors")
        found.append((delivery.send(directory, number)(server), number))
        for place, old in found[-2:]:
            for file in (tmp_path / f"adapter-{old}").iterdir():
                assert Path(place, file.name).read_bytes() == file.read_bytes()
    assert server.whole == 0


def test_host_refuses_invalid_requests(tmp_path: Path) -> None:
    (server,) = host(tmp_path / "a")
    root = tmp_path / "store"
    with publisher([server], root.as_uri(), learner=LEARNER) as learner:
        learner.publish(ListSource(weights(0)), version=3)
        request = learner._write(ListSource(weights(1)), version=2)
        with pytest.raises(UnavailableError, match="version 2 is older than 3"):
            server.fetch(request)
        request = learner._write(ListSource(weights(1)), version=4)
        server.learner = LearnerIdentity("another run", "f" * 16)
        with pytest.raises(UnavailableError, match="another learner"):
            server.fetch(request)
        server.learner = LEARNER
        (file,) = root.rglob("versions/4-*")
        file.write_bytes(file.read_bytes().replace(b'"version":4', b'"version":5'))
        assert server.fetch(request) is None  # asks for it again


def test_a_directory_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "new" / "store"
    old = os.umask(0)
    try:
        with publisher([], root.as_uri(), learner=LEARNER) as learner:
            learner._write(ListSource({"a": np.zeros(3, F16)}), version=0)
            made = [root.parent, root, *(path.parents[1] for path in root.rglob("versions/*"))]
    finally:
        os.umask(old)
    assert len(made) == 3
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    for path in (root, root.parent):  # a parent's owner could put another directory there
        path.chmod(0o777)
        with pytest.raises(StoreError, match=f"{path}: everybody may write to it"):
            publisher([], root.as_uri())
        path.chmod(0o1777)  # as /tmp
        publisher([], root.as_uri()).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(root, 12346, -1) if os.getuid() == 0 else None
    with pytest.raises(StoreError, match="it belongs to another user"):
        publisher([], root.as_uri())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"model.safetensors"', b'"../model.safetensors"'),
        (b'"model.safetensors"', b'"manifest.json"'),
        (b'"format":1', b'"format":2'),
        (b'"word":2', b'"word":3'),
        (b'"word":2', b'"word":"2"'),
        (b'"version":0', b'"version":-1'),
        (b'"nbytes":', b'"nbytes":-'),
        (b'"nbytes":', b'"nbytes":9999999'),
        (b'"nbytes":', b'"bytes":'),
        (b",true]", b",false]"),
        (b",true]", b",1]"),
        (b'[["', b'[["/'),
        (b'"chunks":[[', b'"chunks":[[[],'),
        (b"{", b""),
        (b"{", b"[" * 100_000),
    ],
)
def test_foreign_manifest_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    with publisher([], (tmp_path / "store").as_uri(), learner=LEARNER) as learner:
        learner._write(ListSource({"a": np.zeros(3, F16)}), version=0)
        (file,) = tmp_path.rglob("versions/0-*")
        data = file.read_bytes()
    assert version.dump(version.parse_version(data)) == data
    assert old in data
    with pytest.raises(ManifestError, match="manifest in the store"):
        version.parse_version(data.replace(old, new, 1))


@pytest.mark.parametrize(
    "url",
    [
        "/mnt/shared",
        "ftp://host/x",
        "s3://",
        "file://host",
        "https://me:secret@host/x",
        "s3://b?x=y",
    ],
)
def test_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="address of") as error:
        publisher([], url)
    assert "secret" not in str(error.value)
