"""Prompts: rows of data, rendered, tokenised and put in a reproducible order."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxrl.data.rows import Row, check_characters, read_column

RawPrompt = str | list[dict[str, str]]
"""A prompt as it stands in the data: a text, or messages with role and content."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that jaxrl uses."""

    chat_template: Any
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text."""

    def get_vocab(self) -> dict[str, int]:
        """Returns {token: id} of all tokens."""

    def get_added_vocab(self) -> dict[str, int]:
        """Returns {token: id} of tokens added to the vocabulary, control tokens included."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Returns the text of token ids."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> Any:
        """Renders messages as one text."""


class Example(NamedTuple):
    """One prompt."""

    tokens: np.ndarray  # i32[P], the rendered prompt
    record: Mapping[str, Any]  # the row, with "prompt" (rendered) and "answer" (the reference)
    row: Mapping[str, Any]  # as it stands in the data


class Prompts(NamedTuple):
    """Prompts in the order of the file."""

    examples: Sequence[Example]  # within the length limit
    too_long: int  # number of longer prompts, which were dropped


class Rendering(NamedTuple):
    """The rendering of prompts to text."""

    template: Literal["auto", "chat", "text"] = "auto"  # "auto": "chat" if there is a template
    system_prompt: str | None = None  # content of a first message; needs a chat template
    prompt_format: str = "{prompt}"  # {prompt} is replaced by the prompt
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas for the chat template


def load_prompts(
    rows: Iterator[Row],
    tokenizer: Tokenizer,
    *,
    prompt_key: str,
    answer_key: str | None,
    rendering: Rendering,
    max_tokens: int,
    limit: int | None = None,
) -> Prompts:
    """Renders and tokenises prompts; drops and counts those longer than `max_tokens`.

    The column `prompt_key` has a text or a list of {role, content} messages. The column
    `answer_key` becomes `record["answer"]`; None without reference answers. Reading stops after
    `limit` prompts; None reads all.

    Raises:
      ValueError: for a missing or mistyped column, or if no prompt is left; the message names file,
        line and key.
    """
    render, longest = make_renderer(tokenizer, rendering), most_characters(tokenizer, max_tokens)
    encode = prompt_encoder(tokenizer, rendering)
    examples: list[Example] = []
    too_long, where = 0, "the data"
    for where, record in rows:
        if limit is not None and len(examples) == limit:
            break
        text = render(read_prompt(record, prompt_key, where=where), where)
        if len(text) > longest:
            too_long += 1
            continue
        tokens = np.asarray(encode(text), np.int32)
        if len(tokens) > max_tokens:
            too_long += 1
            continue
        if len(tokens) == 0:
            raise ValueError(f"{where}: the prompt under {prompt_key!r} has no tokens")
        answer = {"answer": read_column(record, answer_key, where=where)} if answer_key else {}
        examples.append(Example(tokens, {**record, "prompt": text, **answer}, record))
    if not examples:
        raise ValueError(
            f"{where}: no prompt fits; {too_long} have more than {max_tokens} tokens, the limit"
        )
    return Prompts(examples, too_long)


def most_characters(tokenizer: Tokenizer, max_tokens: int) -> int:
    """Bounds the characters of a text of `max_tokens` tokens: tokenising megabytes is slow."""
    # Four times the longest tokens, because tokenizers may drop or merge characters.
    return 4 * max_tokens * max(map(len, tokenizer.get_vocab()), default=1)


def uses_template(tokenizer: Tokenizer, rendering: Rendering) -> bool:
    """True if a chat template renders the prompts."""
    auto = rendering.template == "auto" and bool(tokenizer.chat_template)
    return auto or rendering.template == "chat"


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that the tokenizer itself puts in front of a text, such as BOS."""
    whole = tokenizer.encode("a", add_special_tokens=True)
    alone = tokenizer.encode("a", add_special_tokens=False)
    places = range(len(whole) - len(alone) + 1)
    return whole[: next((i for i in places if whole[i : i + len(alone)] == alone), 0)]


def prompt_encoder(tokenizer: Tokenizer, rendering: Rendering) -> Callable[[str], list[int]]:
    """Returns the function that encodes rendered prompts: text -> token ids.

    A chat template has written all tokens. Without one, a prompt gets the `start_tokens` unless it
    begins with them; it never gets what a tokenizer puts after a text.
    """
    start = [] if uses_template(tokenizer, rendering) else start_tokens(tokenizer)

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return tokens if tokens[: len(start)] == start else [*start, *tokens]

    return encode


def make_renderer(tokenizer: Tokenizer, rendering: Rendering) -> Callable[[RawPrompt, str], str]:
    """Returns the function that renders prompts: (prompt, the row's place for errors) -> text.

    The text ends where the completion begins. Only the chat template writes special tokens.

    Raises:
      ValueError: if the rendering needs a chat template and the tokenizer has none.
    """
    chat = uses_template(tokenizer, rendering)
    if chat and not tokenizer.chat_template:
        raise ValueError(
            "data.template = 'chat', but the model's tokenizer has no chat template; "
            "add one to its tokenizer_config.json or set data.template = 'text'"
        )
    if rendering.system_prompt is not None and not chat:
        raise ValueError(
            "data.system_prompt needs a chat template, but the model's tokenizer has none; "
            "put the text into data.prompt_format"
        )

    def render(prompt: RawPrompt, where: str) -> str:
        if not chat:
            if not isinstance(prompt, str):
                raise ValueError(
                    f"{where}: the prompt is a list of messages; it needs a chat template"
                )
            return rendering.prompt_format.replace("{prompt}", prompt)
        system = rendering.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            user = rendering.prompt_format.replace("{prompt}", prompt)
            messages.append({"role": "user", "content": user})
        else:
            messages.extend(prompt)
        try:
            return apply_template(tokenizer, messages, tools=rendering.tools)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    return render


def apply_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Renders messages with the model's chat template, up to the beginning of the next turn, or
    without `add_generation_prompt` up to the end of the last message.

    Raises:
      ValueError: if the template fails or returns no valid text.
    """
    given: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
    except Exception as error:
        raise ValueError(
            f"the model's chat template cannot render {list(messages)!r:.200}: {error!r:.200}; "
            "correct the template, or set data.template = 'text'"
        ) from error
    if not isinstance(text, str):
        raise ValueError(
            f"the model's chat template returns {text!r:.80}, expected a text; correct "
            "chat_template in its tokenizer_config.json, or set data.template = 'text'"
        )
    try:
        check_characters(text)
    except ValueError as error:
        raise ValueError(
            f"the model's chat template renders {list(messages)!r:.200} as text in which {error}"
        ) from None
    return text


def next_indices(size: int, *, position: int, count: int, seed: int) -> np.ndarray:
    """Returns the indices of the next examples out of `size`, i64[count].

    Each epoch is a permutation that depends only on the seed and the epoch's number. So a
    checkpoint holds only the position: the number of examples taken since the start.
    """
    places = np.arange(position, position + count)
    return np.array([_permutation(size, int(p) // size, seed)[p % size] for p in places])


@functools.lru_cache(maxsize=2)
def _permutation(size: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def read_prompt(record: Mapping[str, Any], key: str, *, where: str) -> RawPrompt:
    """Returns the prompt of a column; raises ValueError if it is neither a text nor messages."""
    value = read_column(record, key, where=where)
    if isinstance(value, str):
        return value
    messages = list(value) if isinstance(value, (list, tuple, np.ndarray)) else None
    if messages and all(map(_is_message, messages)):
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise ValueError(
        f"{where}: {key!r} is {value!r:.80}, "
        "expected a text or a list of {role, content} messages, both texts"
    )


def _is_message(value: Any) -> bool:
    named = isinstance(value, Mapping) and (value.get("role"), value.get("content"))
    return bool(named) and all(isinstance(text, str) for text in named)
