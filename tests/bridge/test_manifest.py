"""Checksums detect every change; manifests round-trip and refuse everything else."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.bridge import checksum, manifest
from jaxrl.bridge.base import TensorSpec
from jaxrl.bridge.checksum import CHUNK_BYTES
from jaxrl.bridge.manifest import Entry, Manifest, ManifestError
from tests.bridge.cases import LEARNER

ENTRY = Entry("a.weight", (2, 3), "bfloat16", "model.safetensors", 64, "00")
SIZES = (0, 1, 7, 4096, 8168, 8169, 100_001, CHUNK_BYTES, CHUNK_BYTES + 5)


def total(data: np.ndarray) -> str:
    hashes = [checksum.hash_chunk(chunk) for chunk in checksum.chunks(data)]
    return checksum.combine(hashes, nbytes=data.nbytes)


@pytest.mark.parametrize("size", SIZES)
def test_checksum_is_a_function_of_the_bytes(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert total(data) == total(data.copy())
    longer = np.concatenate([data, np.zeros(1, np.uint8)])
    assert total(data) != total(longer)


@given(
    size=st.sampled_from(SIZES[1:]), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_checksum_detects_every_flipped_bit(size: int, where: float, bit: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    before = total(data)
    data[int(where * size)] ^= 1 << bit
    assert total(data) != before


@pytest.mark.parametrize("row", [8, 128, 4096, 8192])
def test_checksum_detects_swapped_rows(row: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 64 * row, np.uint8)
    swapped = data.reshape(64, row)[np.r_[1, 0, 2:64]].reshape(-1)
    assert total(data) != total(np.ascontiguousarray(swapped))


def test_round_trip() -> None:
    written = Manifest(7, LEARNER, (ENTRY, ENTRY._replace(name="b", shape=(), offset=76)))
    assert manifest.parse(manifest.dump(written)) == written


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
        (broken(format=1), "format 1"),
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
        manifest.parse(text)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ((), r"a\.weight: missing"),
        ((ENTRY, ENTRY._replace(name="b")), r"b: unexpected"),
        ((ENTRY._replace(shape=(3, 2)),), r"a\.weight: shape \(3, 2\).*\(2, 3\)"),
        ((ENTRY._replace(dtype="float16"),), r"a\.weight: dtype float16; expected bfloat16"),
    ],
)
def test_mismatched_tensors_are_refused_by_name(entries: tuple[Entry, ...], named: str) -> None:
    expected = [TensorSpec("a.weight", (2, 3), "bfloat16")]
    manifest.check_tensors((ENTRY,), expected)
    with pytest.raises(ManifestError, match=named):
        manifest.check_tensors(entries, expected)
