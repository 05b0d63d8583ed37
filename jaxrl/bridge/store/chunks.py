"""Chunks of files in a store, and their digests.

XXH3 (128 bits) runs at memory speed. It detects damage, swapped words included. It does not stop a
forger, who can compute the digest of forged bytes; for that he would need the key of the other
digest, HMAC-SHA256 (128 of its bits).
"""

import hashlib
import hmac
from collections.abc import Callable

import numpy as np
import xxhash

CHUNK_BYTES = 2 << 20


def split(data: np.ndarray) -> list[np.ndarray]:
    """Splits u8[N] into consecutive views of CHUNK_BYTES."""
    return [data[i : i + CHUNK_BYTES] for i in range(0, data.nbytes, CHUNK_BYTES)]


Digest = Callable[[bytes | memoryview], str]
"""bytes -> the 128 bits that name them, in hexadecimal."""


def digest(data: bytes | memoryview) -> str:
    """A `Digest` that finds damage."""
    return xxhash.xxh3_128_hexdigest(data)


def keyed_digest(key: str) -> Digest:
    """Returns a `Digest` that nobody can compute without the key."""
    # The key also opens the servers; its use here is a key of its own.
    own = hashlib.blake2b(key.encode(), digest_size=32, person=b"jaxrl store").digest()
    return lambda data: hmac.new(own, data, "sha256").hexdigest()[:32]
