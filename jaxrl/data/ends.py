"""The tokens that end a completion: what the chat template writes after an assistant's words."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl.data.templates import MARK, Rendering, apply_template, uses_template
from jaxrl.data.tokenizer import Tokenizer

_CONTROL = re.compile(r"[<\[].+[>\]]")


class TurnEnd(NamedTuple):
    """The end of an assistant's turn."""

    text: str  # whitespace that the template writes after the words, then the token
    token: int  # the id of its last token


def after_words(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Returns the chat template's text after an assistant's words that `messages` follow.

    Raises:
      ValueError: as `apply_template`.
    """
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
    text = apply_template(
        tokenizer,
        [*before, *messages],
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
    )
    return text.partition(MARK)[2]


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns {token: id} of the tokens that are written in brackets, the longest first."""
    added = tokenizer.get_added_vocab()
    names = filter(_CONTROL.fullmatch, added)
    return {name: added[name] for name in sorted(names, key=len, reverse=True)}


def turn_end(tokenizer: Tokenizer) -> TurnEnd | None:
    """Finds the token that the chat template writes after an assistant's words.

    Returns None without a template, if it cannot be rendered, or if it writes no token there.
    """
    if not tokenizer.chat_template:
        return None
    try:
        last = after_words(tokenizer, [], add_generation_prompt=False)
        prompted = after_words(tokenizer, [], add_generation_prompt=True)
        user = [{"role": "user", "content": "-"}]
        followed = after_words(tokenizer, user, add_generation_prompt=True)
    except ValueError:
        return None
    control = control_tokens(tokenizer)
    token = "|".join(map(re.escape, control)) or "(?!)"
    end, *others = (re.match(rf"\s*({token})", text) for text in (last, prompted, followed))
    if end is None or last == prompted:
        # Some templates begin the next turn after the last message, too, and some end only turns
        # that others follow. The end is then what every next turn begins with.
        end = others[0] if len({other and other[0] for other in others}) == 1 else None
    return TurnEnd(end[0], control[end[1]]) if end is not None else None


def completion_encoder(tokenizer: Tokenizer, rendering: Rendering) -> Callable[[str], list[int]]:
    """Returns the function that encodes completions with their end: text -> token ids.

    A chat template's end of turn follows the words. Without a template, or if the template writes
    none, it is the end-of-sequence token, unless the text ends in it.

    Raises:
      ValueError: if the tokenizer has no end-of-sequence token where it is needed.
    """
    end = turn_end(tokenizer) if uses_template(tokenizer, rendering) else None
    eos = tokenizer.eos_token_id
    if end is not None:
        return lambda text: tokenizer.encode(text + end.text, add_special_tokens=False)
    if eos is None:
        raise ValueError("the tokenizer has no end-of-sequence token; set eos_token in its config")

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return tokens if tokens[-1:] == [eos] else [*tokens, eos]

    return encode


def end_note(tokenizer: Tokenizer, rendering: Rendering) -> str | None:
    """Returns a line that names the end of a turn; None if it is the tokenizer's own end."""
    end = turn_end(tokenizer) if uses_template(tokenizer, rendering) else None
    if end is None or end.token == tokenizer.eos_token_id:
        return None
    eos = "none"
    if tokenizer.eos_token_id is not None:
        eos = tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False)
    return (
        f"completions end in {end.text.strip()}, which the chat template writes after an "
        f"assistant's words; the tokenizer's eos_token is {eos}"
    )
