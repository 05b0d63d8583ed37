"""Sizes of the chunks of logits that the output layer computes at once."""

from typing import NamedTuple

from jaxrl.models.row_parts import Rows


class Chunk(NamedTuple):
    """Size of a chunk of logits: B * positions * vocab entries.

    Attributes:
      positions: tokens per row; None is a quarter of the row, at least 64. Large chunks use an
        accelerator better. Small chunks fit a cache and waste less at the end of a row.
      vocab: largest number of vocabulary entries; None is 16,384, and on a GPU the whole
        vocabulary, for as many positions as keep the logits below 1.6 GB in f32. Parts of a
        vocabulary are products too small for a GPU, and each copies its weights.
    """

    positions: int | None = None
    vocab: int | None = None


DEFAULT_CHUNK = Chunk()
_VOCAB, _LOGITS = 16384, 400_000_000  # entries of a chunk's vocabulary, and of its logits


def position_chunks(rows: int, length: int, *, vocab_size: int, division: Rows) -> int:
    """Returns the number of chunks that rows of `length` tokens are scored in if all tokens are."""
    sizes = chunk_sizes(rows, length, vocab_size=vocab_size, division=division, chunk=DEFAULT_CHUNK)
    return -(-length // division.per_row // sizes[0])


def chunk_sizes(
    rows: int, length: int, *, vocab_size: int, division: Rows, chunk: Chunk
) -> tuple[int, int]:
    """Returns the positions of a chunk, and its largest number of vocabulary entries."""
    length //= division.per_row
    positions = max(64, -(-length // 4)) if chunk.positions is None else chunk.positions
    vocab = chunk.vocab
    if vocab is None:
        vocab = _VOCAB
        if division.platform == "gpu":
            vocab, own = vocab_size, max(1, rows * division.per_row // division.parts)
            positions = min(positions, max(1, _LOGITS // (own * vocab_size)))
    return min(positions, length), vocab


def vocab_chunks(vocab_size: int, most: int) -> int:
    """Returns a number of chunks of at most `most` entries. Prefers a divisor of the vocabulary,
    because otherwise the unembedding must be padded, hence copied."""
    least = -(-vocab_size // most)
    return next((n for n in range(least, 2 * least) if vocab_size % n == 0), least)
