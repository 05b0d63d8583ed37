"""Preference pairs: a chosen and a rejected completion of one prompt, read and tokenised."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout, given_rollout
from jaxrl.data.ends import completion_encoder
from jaxrl.data.messages import Message, RawPrompt, read_prompt, read_tools
from jaxrl.data.prompts import most_characters, prompt_encoder
from jaxrl.data.rows import Row, read_column
from jaxrl.data.spool import Spool
from jaxrl.data.templates import Renderer, Rendering, make_renderer
from jaxrl.data.tokenizer import Tokenizer


class Pair(NamedTuple):
    """Two completions of one prompt; both end as `completion_encoder` ends them."""

    chosen: Rollout
    rejected: Rollout
    margin: float  # wanted difference of their scores

    @property
    def length(self) -> int:
        """Number of tokens of both completions, each with its prompt."""
        return self.chosen.length + self.rejected.length


class Pairs(NamedTuple):
    """Pairs in the order of the file."""

    pairs: Sequence[Pair]  # that fit into a row
    too_long: int  # number of longer pairs, which were dropped


class PairColumns(NamedTuple):
    """Names of the columns that hold a pair."""

    prompt: str | None  # None if the messages before the chosen completion are the prompt
    chosen: str
    rejected: str
    margin: str | None = None  # None for 0


def read_pairs(
    rows: Iterator[Row],
    tokenizer: Tokenizer,
    *,
    columns: PairColumns,
    rendering: Rendering,
    max_tokens: int,
) -> Pairs:
    """Tokenises pairs, prompt and completion separately as in sampling. Drops and counts pairs with
    more than `max_tokens`.

    Raises:
      ValueError: for a missing or mistyped column, completions of different prompts, a margin that
        is not a number, a tokenizer without an end-of-sequence token, or if no pair is left; the
        message names file, line and key.
    """
    encode = prompt_encoder(tokenizer, rendering)
    finish = completion_encoder(tokenizer, rendering)
    render = make_renderer(tokenizer, rendering)
    longest = most_characters(tokenizer, max_tokens)
    pairs = Spool[Pair]()
    too_long, where = 0, "the data"
    for where, record in rows:
        texts = _texts(record, columns, render=render, where=where)
        if sum(len(prompt) + len(completion) for prompt, completion in texts) > longest:
            too_long += 1
            continue
        tokens = [(encode(prompt), finish(completion)) for prompt, completion in texts]
        if not all(prompt for prompt, _ in tokens):
            raise ValueError(f"{where}: the prompt has no tokens; a completion needs at least one")
        better, worse = (given_rollout(prompt, said) for prompt, said in tokens)
        pair = Pair(better, worse, _margin(record, columns, where=where))
        if pair.length > max_tokens:
            too_long += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise ValueError(
            f"{where}: no pair is left; each of the {too_long} has more than {max_tokens} tokens, "
            "its prompt counted twice; raise train.row_length"
        )
    return Pairs(pairs, too_long)


def _texts(
    record: Mapping[str, Any], columns: PairColumns, *, render: Renderer, where: str
) -> list[tuple[str, str]]:
    """Returns the rendered prompt and completion of the chosen and of the rejected one."""
    before, completions = [], list[str | Message]()
    for key in (columns.chosen, columns.rejected):
        value = read_prompt(record, key, where=where, setting="data.chosen_key and rejected_key")
        if isinstance(value, list) and value[-1]["role"] != "assistant":
            raise ValueError(f"{where}: the last message of {key!r} is not the assistant's")
        before.append([] if isinstance(value, str) else value[:-1])
        completions.append(value if isinstance(value, str) else value[-1])
    if before[0] != before[1]:
        raise ValueError(
            f"{where}: {columns.chosen!r} and {columns.rejected!r} have different prompts"
        )
    prompt = _prompt(record, columns, before[0], where=where)
    tools = read_tools(record, where=where)
    found = []
    for said in completions:
        if isinstance(said, str):
            found.append((render(prompt, where, tools=tools), said))
        else:
            found.extend(render.turns(prompt, [said], where, tools=tools))
    return found


def _prompt(
    record: Mapping[str, Any], columns: PairColumns, before: list[Message], *, where: str
) -> RawPrompt:
    """Returns the prompt of a pair, whose completions come after the messages `before`."""
    if columns.prompt is None:
        if not before:
            raise ValueError(
                f"{where}: data.prompt_key = 'none', but {columns.chosen!r} has no messages "
                "before the completion; name the column of the prompt"
            )
        return before
    setting = "data.prompt_key, to 'none' if the completions are conversations with the prompt"
    prompt = read_prompt(record, columns.prompt, where=where, setting=setting)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if before not in ([], messages):
        raise ValueError(
            f"{where}: the messages before the completion in {columns.chosen!r} differ from "
            f"{columns.prompt!r}; set data.prompt_key = 'none' if they are the prompt"
        )
    return prompt


def _margin(record: Mapping[str, Any], columns: PairColumns, *, where: str) -> float:
    if columns.margin is None:
        return 0.0
    value = read_column(record, columns.margin, where=where, setting="data.margin_key")
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"{where}: {columns.margin!r} is {value!r:.80}, expected a number")
    return float(value)
