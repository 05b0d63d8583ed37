"""The text that each token of a completion adds."""

from collections.abc import Sequence

from jaxrl.data.prompts import Tokenizer

_UNKNOWN = "\ufffd"  # replaces bytes that are not a character
_MOST_HELD = 16  # tokens that may wait for the end of a character; valid text needs few


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text of every token; joined they equal the text of all tokens.

    A token decoded alone may have another text: tokenizers like Llama 2's drop a leading space, and
    a character may span several tokens. So each token is decoded after a few earlier ones, in
    linear time. A character's last token gets all of it; the others get "".
    """
    texts = [""] * len(ids)
    start = known = 0  # ids[start:known] are context, their texts are known

    def text(end: int) -> str:
        return tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)

    before = ""
    for i in range(len(ids)):
        now = text(i + 1)
        whole = len(now) > len(before) and not now.endswith(_UNKNOWN)
        if whole or i + 1 == len(ids) or i + 1 - known == _MOST_HELD:
            texts[i] = now[len(before) :]
            start, known = known, i + 1
            before = text(known)
    return texts
