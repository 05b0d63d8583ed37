"""Checksum of a tensor's bytes, computed chunk by chunk on several threads.

Every chunk is hashed with XXH3 (128 bits), at memory speed. It finds damage, words that change
places included; it does not keep out a forger, who could write a checksum of his own.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import xxhash

CHUNK_BYTES = 2 << 20


def chunks(data: np.ndarray) -> list[np.ndarray]:
    """Splits u8[N] into consecutive views of CHUNK_BYTES."""
    return [data[i : i + CHUNK_BYTES] for i in range(0, data.nbytes, CHUNK_BYTES)]


def hash_chunk(chunk: np.ndarray) -> bytes:
    """Returns the hash of u8[N]."""
    return hash_bytes(chunk.data)


def hash_bytes(data: bytes | memoryview) -> bytes:
    """Returns the hash of bytes."""
    return xxhash.xxh3_128_digest(data)


def combine(hashes: Sequence[bytes], *, nbytes: int) -> str:
    """Returns the 128-bit checksum, in hexadecimal, of data whose `chunks` have these hashes."""
    digest = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=16)
    for part in hashes:
        digest.update(part)
    return digest.hexdigest()
