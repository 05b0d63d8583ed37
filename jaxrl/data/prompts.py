"""Prompts: rows of data, rendered, tokenised and put in a reproducible order."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.messages import read_prompt, read_tools
from jaxrl.data.rows import Row, read_column
from jaxrl.data.spool import Spool
from jaxrl.data.templates import Rendering, make_renderer, uses_template
from jaxrl.data.tokenizer import Tokenizer

_TOGETHER = 1000  # prompts that are encoded at once


@dataclasses.dataclass(frozen=True, eq=False)
class Example(Mapping[str, Any]):
    """One prompt: what rewards and environments read by key.

    The keys are the columns of the row, unchanged; "prompt" and "answer", the columns that the
    config names; and "rendered_prompt", the text that the model reads.
    """

    tokens: np.ndarray  # i32[P], of the rendered prompt
    record: Mapping[str, Any]  # its keys and values
    row: Mapping[str, Any]  # as it stands in the data

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)


class Prompts(NamedTuple):
    """Prompts in the order of the file."""

    examples: Sequence[Example]  # within the length limit
    too_long: int  # number of longer prompts, which were dropped


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

    The column `prompt_key` has a text or a list of messages, rendered with the tools in the
    column "tools", if any. The column `answer_key` becomes `example["answer"]`; None without
    reference answers. Reading stops after `limit` prompts; None reads all.

    Raises:
      ValueError: for a missing or mistyped column, or if no prompt is left; the message names file,
        line and key.
    """
    render, longest = make_renderer(tokenizer, rendering), most_characters(tokenizer, max_tokens)
    encode = prompts_encoder(tokenizer, rendering)
    examples = Spool[Example]()
    too_long, where = 0, "the data"

    def rendered() -> Iterator[tuple[Row, str]]:
        nonlocal too_long, where
        for row in rows:
            where, tools = row.where, read_tools(row.record, where=row.where)
            prompt = read_prompt(row.record, prompt_key, where=where, setting="data.prompt_key")
            text = render(prompt, where, tools=tools)
            if len(text) > longest:
                too_long += 1
            else:
                yield row, text

    texts = rendered()
    while limit is None or len(examples) < limit:
        most = _TOGETHER if limit is None else min(_TOGETHER, limit - len(examples))
        some = list(itertools.islice(texts, most))
        if not some:
            break
        for (row, text), ids in zip(some, encode([text for _, text in some]), strict=True):
            if len(ids) > max_tokens:
                too_long += 1
                continue
            if not ids:
                raise ValueError(f"{row.where}: the prompt under {prompt_key!r} has no tokens")
            named = {"prompt": row.record[prompt_key], "rendered_prompt": text}
            if answer_key:
                setting = "data.answer_key, to 'none' if the data has no answers"
                answer = read_column(row.record, answer_key, where=row.where, setting=setting)
                named["answer"] = answer
            tokens = np.asarray(ids, np.int32)
            examples.append(Example(tokens, {**row.record, **named}, row.record))
    if not examples:
        raise ValueError(
            f"{where}: no prompt is left; each of the {too_long} has more than "
            f"data.max_prompt_tokens = {max_tokens} tokens; raise the key or shorten the prompts"
        )
    return Prompts(examples, too_long)


def most_characters(tokenizer: Tokenizer, max_tokens: int) -> int:
    """Bounds the characters of a text of `max_tokens` tokens: tokenising megabytes is slow."""
    # Four times the longest tokens, because tokenizers may drop or merge characters.
    return 4 * max_tokens * max(map(len, tokenizer.get_vocab()), default=1)


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
    encode = prompts_encoder(tokenizer, rendering)
    return lambda text: encode([text])[0]


def prompts_encoder(
    tokenizer: Tokenizer, rendering: Rendering
) -> Callable[[list[str]], list[list[int]]]:
    """Returns the function that encodes many rendered prompts as `prompt_encoder` does each, in
    threads if the tokenizer is one in Rust."""
    start = [] if uses_template(tokenizer, rendering) else start_tokens(tokenizer)
    together: Any = tokenizer if getattr(tokenizer, "is_fast", False) else None

    def encode(texts: list[str]) -> list[list[int]]:
        if together is None:
            found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            options = {"add_special_tokens": False, "return_attention_mask": False}
            found = together(texts, **options)["input_ids"]
        return [ids if ids[: len(start)] == start else [*start, *ids] for ids in found]

    return encode


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
