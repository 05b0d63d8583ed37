"""Snapshots that are written while the devices go on."""

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.service import snapshots as module
from jaxrl.service.files import Files, read_tenant
from jaxrl.service.pool import Kind
from jaxrl.service.snapshots import Snapshots
from jaxrl.service.state import Store


def state(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((3, 2), value, np.float32), "count": np.int32(value)}


def last(made: Snapshots, directory: Path) -> tuple[dict[str, np.ndarray], int]:
    """The last snapshot and the request that it includes."""
    file, stamp = directory / "snapshots" / "m.npz", made.last("m")
    assert stamp is not None
    stamp.wait(file)
    return read_tenant(file, like=state(0.0))


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "state.sqlite")
    made.insert("models", id="m")
    for seq in range(3):
        made.accept(f"m:{seq}", target="m", seq=seq, owner="o", kind="compute", body=b"body")
    yield made
    made.close()


def bodies(store: Store) -> list[bytes | None]:
    return [row["body"] for row in store.all("SELECT body FROM requests ORDER BY seq")]


def test_a_snapshot_is_read_as_written_and_its_requests_are_kept_until_then(
    tmp_path, store, monkeypatch
) -> None:
    go, write = threading.Event(), module.write_tenant

    def slow(file, tenant, *, seq):
        assert go.wait(250)
        write(file, tenant, seq=seq)

    monkeypatch.setattr(module, "write_tenant", slow)
    made = Snapshots(store, Files(tmp_path, base_name="b"), seconds=0)
    assert made.due("m")
    own = state(7.0)
    made.write("m", own, seq=1)
    assert not made.due("m")
    assert bodies(store) == [b"body"] * 3
    go.set()
    found, seq = last(made, tmp_path)
    np.testing.assert_array_equal(found["x"], own["x"])
    assert (found["count"], seq) == (7, 1)
    assert bodies(store) == [None, None, b"body"]
    made.close()


def test_a_snapshot_that_cannot_be_written_leaves_the_one_before_it(
    tmp_path, store, monkeypatch, caplog
) -> None:
    made = Snapshots(store, Files(tmp_path, base_name="b"), seconds=0)
    assert made.last("m") is None
    made.write("m", state(7.0), seq=0)
    made.settle("m")

    def full(stream, **arrays):
        stream.write(b"a part")
        raise OSError("no space")

    monkeypatch.setattr(np, "savez", full)
    made.write("m", state(8.0), seq=2)
    found, seq = last(made, tmp_path)
    assert (found["count"], seq) == (7, 0)
    assert bodies(store) == [None, b"body", b"body"]
    assert "the snapshot of m failed" in caplog.text
    assert [file.name for file in (tmp_path / "snapshots").iterdir()] == ["m.npz"]
    made.close()


def test_a_checkpoint_that_cannot_be_written_leaves_the_disk_as_it_was(
    tmp_path, monkeypatch
) -> None:
    def full(directory, *_, **__):
        (directory / "adapter_model.safetensors").write_bytes(b"a part")
        raise OSError("no space")

    monkeypatch.setattr(huggingface, "save_adapter", full)
    precision = SimpleNamespace(wire=np.float32)
    base = SimpleNamespace(precision=precision, model=None)
    pool = SimpleNamespace(base=base, kind=Kind(4), specs=None)
    tenant = SimpleNamespace(state=SimpleNamespace(params={}))
    made = Files(tmp_path, base_name="b")
    with pytest.raises(OSError, match="no space"):
        made.write_checkpoint("tinker://m/weights/one", pool, tenant, state=True)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("checkpoints/m/weights/.*"))
