"""A look at what a model reads: lengths in tokens, and texts with their trained tokens marked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer

OPEN, CLOSE = "⟦", "⟧"  # around trained tokens


def length_line(kind: str, lengths: Sequence[int]) -> str:
    """Returns the number of sequences and their lengths in tokens, as one line."""
    median, high = np.percentile(lengths, [50, 99], method="higher")
    return (
        f"{kind}: {len(lengths)}; tokens: median {median}, 99th percentile {high}, "
        f"longest {max(lengths)}"
    )


def marked_text(tokenizer: Tokenizer, prompt: Any, trained: Any = ()) -> str:
    """Returns the text of a prompt i[P] with its special tokens, and the trained tokens i[C] that
    follow in ⟦ ⟧."""
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    if len(trained):
        said = tokenizer.decode(trained, skip_special_tokens=False)
        text += f"{OPEN}{said}{CLOSE}"
    return text


def one_line(text: str, *, most: int = 160) -> str:
    """Returns a text in one line, its middle left out if it is longer than `most` characters."""
    text = text.replace("\n", "\\n")
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
