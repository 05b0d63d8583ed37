"""The text that each token of an answer adds."""

from collections.abc import Sequence

from jaxrl.data.prompts import Tokenizer

_UNKNOWN = "\ufffd"  # stands for bytes that are no character
_MOST_HELD = 16  # tokens; valid text waits for the few that make up one character


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of every token; joined they are the text of all tokens.

    A token by itself may have another text: tokenizers in the style of Llama 2 drop a space that a
    text begins with, and a character may have several tokens. So every token is decoded behind the
    ones before it, of which a few are enough: the time is linear in the number of tokens. The last
    token of a character has all of it, the others have "".
    """
    found = [""] * len(ids)
    start = known = 0  # what ids[start:known] add is in `found` already

    def text(end: int) -> str:
        return tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)

    before = ""
    for i in range(len(ids)):
        now = text(i + 1)
        whole = len(now) > len(before) and not now.endswith(_UNKNOWN)
        if whole or i + 1 == len(ids) or i + 1 - known == _MOST_HELD:
            found[i] = now[len(before) :]
            start, known = known, i + 1
            before = text(known)
    return found
