"""Texts that end a completion, matched on the text that its tokens stand for."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl.data.prompts import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class StopTexts:
    """Texts that end a completion at the token that completes the first of them.

    A text may begin and end within a token and span any number of tokens. Special tokens count as
    their text. The prompt does not count.

    A finite automaton (Aho and Corasick 1975) reads the completion's bytes; a step of it is a
    token. Its states are the beginnings of the texts, and a last one for a complete text. Few
    tokens differ in what they do to a state, so they share rows.

    Attributes:
      texts: the texts.
      row_of: i32[V + 1], the row of each token id; the last entry is for ids without a token.
      moves: i32[R, S], the state after a token of a row, from each state. It begins in state 0.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        """Builds the automaton; for 150,000 tokens this takes about a second.

        Args:
          tokenizer: the model's.
          texts: the texts.

        Raises:
          ValueError: if there is no text, or one is empty or no valid Unicode.
        """
        self.texts = tuple(texts)
        if not self.texts or not all(self.texts):
            raise ValueError(f"stop texts {list(self.texts)}: each needs at least one character")
        moves = _token_moves(token_bytes(tokenizer), _byte_moves([t.encode() for t in self.texts]))
        rows: dict[bytes, int] = {}  # np.unique takes ten times as long
        row_of = [rows.setdefault(row.tobytes(), len(rows)) for row in moves]
        self.row_of = np.array(row_of, np.int32)
        self.moves = np.frombuffer(b"".join(rows), np.int32).reshape(-1, moves.shape[1])

    def end(self, tokens: Sequence[int]) -> int | None:
        """Returns the number of tokens up to the end of the first text, or None without any."""
        state, complete = 0, self.moves.shape[1] - 1
        rows = np.minimum(np.asarray(tokens, np.int32), len(self.row_of) - 1)
        for count, row in enumerate(self.row_of[rows], 1):
            state = self.moves[row, state]
            if state == complete:
                return count
        return None


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Returns the bytes that each token id adds to a text, and b"" for an id without a token. A
    token may hold part of a character."""
    # transformers' own method takes five times as long.
    decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
    # A decoder may drop the space of a text's first token.
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    skipped = len(decode(before, skip_special_tokens=False))
    vocabulary = tokenizer.get_vocab()
    found = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        text = decode([*before, i], skip_special_tokens=False)[skipped:]
        found[i] = _partial(token) if "\ufffd" in text else text.encode()
    return found


def _partial(token: str) -> bytes:
    """Returns the bytes of a token that holds part of a character, as byte-level BPE and as
    SentencePiece write it."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    if set(token) <= _BYTE_OF.keys():
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _byte_characters() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE (GPT-2): bytes without a visible
    character have those from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_characters()


def _byte_moves(texts: Sequence[bytes]) -> np.ndarray:
    """Returns the automaton over bytes, i32[S, 256]; the last state is left by no byte."""
    beginnings = sorted({text[:n] for text in texts for n in range(len(text))}, key=len)
    state_of = {beginning: state for state, beginning in enumerate(beginnings)}
    complete = len(beginnings)
    moves = np.zeros((complete + 1, 256), np.int32)
    moves[complete] = complete
    for beginning, state in state_of.items():
        for byte in set(b"".join(texts)):
            read = beginning + bytes([byte])
            ends = (read[n:] for n in range(len(read) + 1))
            complete_now = read.endswith(tuple(texts))
            moves[state, byte] = (
                complete if complete_now else next(state_of[end] for end in ends if end in state_of)
            )
    return moves


def _token_moves(tokens: Sequence[bytes], byte_moves: np.ndarray) -> np.ndarray:
    """Returns the state after each token, from each state, i32[V + 1, S]; the last row is of a
    token without bytes."""
    states = np.arange(len(byte_moves), dtype=np.int32)
    moves = np.tile(states, (len(tokens) + 1, 1))
    lengths = np.array([len(token) for token in tokens])
    starts = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(tokens), np.uint8)
    for position in range(max(lengths)):
        longer = np.flatnonzero(lengths > position)
        read = text[starts[longer] + position]
        moves[longer] = byte_moves[moves[longer], read[:, None]]
    return moves
