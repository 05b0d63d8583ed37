"""Manifests round-trip and refuse everything else, and tell when a payload was written to."""

import json
import tempfile
from pathlib import Path

import pytest

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import TensorSpec
from jaxrl.bridge.manifest import Manifest, ManifestEntry, ManifestError
from jaxrl.bridge.owned_directory import MEMORY
from tests.bridge.cases import LEARNER

ENTRY = ManifestEntry("a.weight", (2, 3), "bfloat16", "model.safetensors", 64)


def test_round_trip() -> None:
    written = Manifest(7, LEARNER, (ENTRY, ENTRY._replace(name="b", shape=(), offset=76)))
    assert manifest.parse_manifest(manifest.dump(written)) == written


def test_every_manifest_is_a_new_generation() -> None:
    content, seen = Manifest(7, LEARNER, (ENTRY,)), set[tuple[int, int] | None]()
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        directory = Path(name)
        for _ in range(20):
            assert manifest.generation(directory) is None
            payload.write_manifest(directory, content)
            found = manifest.generation(directory)
            manifest.read(directory)
            assert manifest.generation(directory) == found
            assert found not in seen
            seen.add(found)
            (directory / manifest.FILE).unlink()


def broken(**changes: object) -> str:
    raw = json.loads(manifest.dump(Manifest(7, LEARNER, (ENTRY,))))
    for key, value in changes.items():
        place = raw if key in raw else raw["tensors"][0]
        place[key] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "exactly the keys"),
        (broken(format=2), "format 2"),
        (broken(version=-1), "version"),
        (broken(version="7"), "version"),
        (broken(surprise=1), "surprise"),
        (broken(shape=[2, -3]), r"a\.weight: the shape"),
        (broken(shape=[2, True]), r"a\.weight: the shape"),
        (broken(dtype="int8"), r"a\.weight: dtype 'int8'"),
        (broken(file="../model.safetensors"), r"a\.weight: '\.\./model"),
        (broken(file="/etc/passwd"), r"a\.weight: '/etc"),
        (broken(file=".."), r"a\.weight: '\.\.'"),
        (broken(offset=-1), r"a\.weight: the offset"),
        (
            manifest.dump(Manifest(7, LEARNER, (ENTRY, ENTRY))),
            r"a\.weight: occurs twice in the manifest",
        ),
    ],
)
def test_invalid_manifests_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ManifestError, match=named):
        manifest.parse_manifest(text)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ((), r"a\.weight: missing"),
        ((ENTRY, ENTRY._replace(name="b")), r"b: unexpected"),
        ((ENTRY._replace(shape=(3, 2)),), r"a\.weight: shape \(3, 2\).*\(2, 3\)"),
        ((ENTRY._replace(dtype="float16"),), r"a\.weight: dtype float16; expected bfloat16"),
    ],
)
def test_mismatched_tensors_are_refused_by_name(
    entries: tuple[ManifestEntry, ...], named: str
) -> None:
    expected = [TensorSpec("a.weight", (2, 3), "bfloat16")]
    manifest.check_tensors((ENTRY,), expected)
    with pytest.raises(ManifestError, match=named):
        manifest.check_tensors(entries, expected)
