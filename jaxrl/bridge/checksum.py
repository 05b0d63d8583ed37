"""Chunks of bytes, and their hashes.

Every chunk is hashed with XXH3 (128 bits), at memory speed. It finds damage, words that change
places included; it does not keep out a forger, who could write a hash of his own.
"""

import numpy as np
import xxhash

CHUNK_BYTES = 2 << 20


def chunks(data: np.ndarray) -> list[np.ndarray]:
    """Splits u8[N] into consecutive views of CHUNK_BYTES."""
    return [data[i : i + CHUNK_BYTES] for i in range(0, data.nbytes, CHUNK_BYTES)]


def hash_bytes(data: bytes | memoryview) -> bytes:
    """Returns the hash of bytes."""
    return xxhash.xxh3_128_digest(data)
