"""Whoever may write to a store cannot give the servers weights of his own without their key."""

import json
from pathlib import Path

import pytest
import xxhash

from jaxrl.bridge.base import UnavailableError
from jaxrl.bridge.store import agent
from jaxrl.bridge.store.publisher import bring
from tests.bridge.cases import ListSource
from tests.bridge.store.hosts import host
from tests.bridge.store.test_store import check, publisher, weights
from tests.bridge.store.web_store import WebStore


@pytest.mark.parametrize("kind", ["chunks", "versions"])
def test_what_a_stranger_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Even if every forgery had the right XXH3. The learner writes the objects again."""
    monkeypatch.setattr(agent, "_PAUSE", 0.0)
    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda _: "0" * 32)
    (server,) = host(tmp_path / "a", key="a key")
    with WebStore() as store, publisher([server], f"http://127.0.0.1:{store.port}") as learner:
        request = learner._write(ListSource(weights(0)), version=0)
        genuine = dict(store.objects)
        for path, data in genuine.items():
            if "/chunks/" in path and kind == "chunks":
                store.objects[path] = bytes(len(data))
            elif "/versions/" in path and kind == "versions":
                content = json.loads(data)
                for file in content["files"]:
                    for chunk in file["chunks"]:
                        where = path.replace("versions", "chunks").rpartition("/")[0]
                        size = len(genuine[f"{where}/{chunk[0]}"])
                        chunk[0] = "f" * 32
                        store.objects[f"{where}/{chunk[0]}"] = bytes(size)
                store.objects[path] = json.dumps(content).encode()
        assert store.objects != genuine
        name = bring(server, learner._upload, request)
        server.update(f"{name.parent.name}/{name.name}", version=0, in_flight="keep")
        check(server, weights(0))
        assert server.whole > 0


def test_both_sides_have_a_key_or_neither(tmp_path: Path) -> None:
    (server,) = host(tmp_path / "a")
    with (
        WebStore() as store,
        publisher([server], f"http://127.0.0.1:{store.port}") as learner,
        pytest.raises(UnavailableError, match="must both have JAXRL_API_KEY, or neither"),
    ):
        learner.publish(ListSource(weights(0)), version=0)
