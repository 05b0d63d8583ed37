"""The digest of a chunk sees every change of its bytes and of their places."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.bridge.store.chunks import CHUNK_BYTES, digest, keyed_digest, split

SIZES = (1, 7, 4096, 8169, 100_001, CHUNK_BYTES)


@pytest.mark.parametrize("size", [0, *SIZES, CHUNK_BYTES + 5, 3 * CHUNK_BYTES])
def test_chunks_are_all_bytes_in_order(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    parts = split(data)
    assert b"".join(part.tobytes() for part in parts) == data.tobytes()
    assert all(0 < part.nbytes <= CHUNK_BYTES for part in parts)


@pytest.mark.parametrize("size", SIZES)
def test_digest_depends_on_bytes_only(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert digest(data.data) == digest(data.tobytes())
    assert digest(data.data) != digest(data.tobytes() + b"\0")


def test_a_keyed_digest_is_hmac_by_its_definition() -> None:
    data, key = b"some bytes" * 1000, "a key"
    own = (
        hashlib.blake2b(key.encode(), digest_size=32, person=b"jaxrl store")
        .digest()
        .ljust(64, b"\0")
    )
    inner, outer = (bytes(byte ^ pad for byte in own) for pad in (0x36, 0x5C))
    expected = hashlib.sha256(outer + hashlib.sha256(inner + data).digest()).hexdigest()[:32]
    assert keyed_digest(key)(data) == keyed_digest(key)(memoryview(data)) == expected
    assert keyed_digest("another key")(data) != expected


@given(size=st.sampled_from(SIZES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_seen(size: int, where: float, bit: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    before = digest(data.data)
    data[int(where * size)] ^= 1 << bit
    assert digest(data.data) != before


def flip_two_signs(words: np.ndarray) -> None:
    words[[5, 5 + 4 * 1021]] ^= 0x8000


def reverse(words: np.ndarray) -> None:
    words[: words.size // 2] = words[: words.size // 2][::-1].copy()


def swap_rows(words: np.ndarray) -> None:
    rows = words[: 8 * 4084].reshape(8, 4084)
    rows[[0, 1]] = rows[[1, 0]]


@pytest.mark.parametrize("change", [flip_two_signs, reverse, swap_rows])
def test_words_that_change_places_are_seen(change: Callable[[np.ndarray], None]) -> None:
    words = np.random.default_rng(0).integers(0, 2**16, CHUNK_BYTES // 2, np.uint16)
    before = digest(words.data.cast("B"))
    change(words)
    assert digest(words.data.cast("B")) != before


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.permutations(range(6)))
def test_blocks_that_change_places_are_seen(seed: int, order: list[int]) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (6, int(rng.choice([8, 64, 8168, CHUNK_BYTES // 6]))), np.uint8)
    moved = np.ascontiguousarray(blocks[order])
    same = digest(blocks.tobytes()) == digest(moved.tobytes())
    assert same == (order == sorted(order))
