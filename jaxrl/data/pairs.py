"""Pairs of answers to one prompt, a chosen and a rejected one: read, tokenised and packed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data import prompts
from jaxrl.data.prompts import Rendering, Row, Tokenizer
from jaxrl.data.texts import answered, end_of

Prompt = str | list[dict[str, str]]


class Pair(NamedTuple):
    """Two answers to one prompt; both completions end with the end-of-sequence token.

    Attributes:
      chosen, rejected: the better and the worse answer.
      margin: by how much the chosen one shall be worth more.
    """

    chosen: Rollout
    rejected: Rollout
    margin: float

    @property
    def length(self) -> int:
        """Tokens of both answers, each with its prompt."""
        return self.chosen.length + self.rejected.length


class Pairs(NamedTuple):
    """Pairs in the order of the file.

    Attributes:
      pairs: those that fit into a row.
      too_long: number of pairs that do not and were left out.
    """

    pairs: Sequence[Pair]
    too_long: int


class Columns(NamedTuple):
    """Names of the columns that hold a pair.

    Attributes:
      prompt: None if the prompt is the messages before the chosen answer.
      chosen, rejected: the two answers.
      margin: by how much the chosen one should score higher; None for 0.
    """

    prompt: str | None
    chosen: str
    rejected: str
    margin: str | None = None


def read_pairs(
    rows: Iterator[Row],
    tokenizer: Tokenizer,
    *,
    columns: Columns,
    rendering: Rendering,
    max_tokens: int,
) -> Pairs:
    """Tokenises pairs. Prompt and answer are tokenised separately, as in sampling, where the prompt
    is given.

    Args:
      rows: from `prompts.read_rows`.
      tokenizer: the model's.
      columns: where a pair stands in a row.
      rendering: how a prompt becomes text.
      max_tokens: a pair with more tokens is left out and counted.

    Raises:
      ValueError: for a row without a column or with another type there, two answers to different
        prompts, a margin that is no number, a tokenizer without an end-of-sequence token, or if no
        pair is left; the message names file, line and key.
    """
    end = end_of(tokenizer)
    render = prompts.renderer(tokenizer, rendering)
    pairs: list[Pair] = []
    too_long, where = 0, "the data"
    for where, record in rows:
        prompt, chosen, rejected = _texts(record, columns, where=where)
        tokens = tokenizer.encode(render(prompt, where=where), add_special_tokens=False)
        if not tokens:
            raise ValueError(f"{where}: the prompt has no tokens, so no answer could follow it")
        better, worse = (
            answered(tokens, [*tokenizer.encode(text, add_special_tokens=False), end])
            for text in (chosen, rejected)
        )
        pair = Pair(better, worse, _margin(record, columns, where=where))
        if pair.length > max_tokens:
            too_long += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise ValueError(
            f"{where}: no pair to use; {too_long} have more than {max_tokens} tokens, their prompt "
            "counted twice (train.row_length)"
        )
    return Pairs(pairs, too_long)


def _texts(record: Mapping[str, Any], columns: Columns, *, where: str) -> tuple[Prompt, str, str]:
    """Prompt, chosen and rejected answer."""
    before, answers = [], []
    for key in (columns.chosen, columns.rejected):
        value = prompts.prompt_of(record, key, where=where)
        if isinstance(value, list) and value[-1]["role"] != "assistant":
            raise ValueError(f"{where}: the last message of {key!r} is not the assistant's answer")
        before.append([] if isinstance(value, str) else value[:-1])
        answers.append(value if isinstance(value, str) else value[-1]["content"])
    if before[0] != before[1]:
        raise ValueError(
            f"{where}: {columns.chosen!r} and {columns.rejected!r} answer different prompts"
        )
    if columns.prompt is None:
        if not before[0]:
            raise ValueError(
                f"{where}: data.prompt_key = 'none', and {columns.chosen!r} holds no message "
                "before the answer that could be the prompt"
            )
        return before[0], answers[0], answers[1]
    prompt = prompts.prompt_of(record, columns.prompt, where=where)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if before[0] not in ([], messages):
        raise ValueError(
            f"{where}: the messages before the answer in {columns.chosen!r} are not those of "
            f"{columns.prompt!r}; set data.prompt_key = 'none' if they are the prompt"
        )
    return prompt, answers[0], answers[1]


def _margin(record: Mapping[str, Any], columns: Columns, *, where: str) -> float:
    if columns.margin is None:
        return 0.0
    value = prompts.column(record, columns.margin, where=where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"{where}: {columns.margin!r} is {value!r:.80}, expected a number")
    return float(value)
