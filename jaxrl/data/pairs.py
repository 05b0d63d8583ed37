"""Pairs of answers to one prompt, a chosen and a rejected one: read, tokenised and packed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.builders import parts
from jaxrl.config.preference import PairDataConfig, RankedDataConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.batch import Rollout, assign_rows, pack
from jaxrl.core.metrics import Metrics, merge, to_floats
from jaxrl.data import prompts
from jaxrl.data.prompts import Row, Tokenizer
from jaxrl.learner.policy import Minibatch
from jaxrl.training.supervised.fit import HostBatch, answered, end_of, place, rows_for
from sharding.partition import Layout

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


def load_training_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Pairs:
    """The pairs under `data.path`; raises as `read_pairs`."""
    rows = prompts.read_rows(config.path, split=config.split, subset=config.subset)
    return read_pairs(rows, config, tokenizer, max_tokens=max_tokens)


def load_held_out_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Pairs:
    """The pairs under `data.eval_path`, none without it; raises as `read_pairs`."""
    if config.eval_path is None:
        return Pairs([], 0)
    rows = prompts.read_rows(config.eval_path, split=config.eval_split, subset=config.subset)
    found = read_pairs(rows, config, tokenizer, max_tokens=max_tokens)
    return found._replace(pairs=found.pairs[: config.eval_limit])


def read_pairs(
    rows: Iterator[Row], config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int
) -> Pairs:
    """Tokenises pairs. Prompt and answer are tokenised each for itself, as in sampling, where the
    prompt is given.

    Args:
      rows: from `data.read_rows`.
      config: names the columns, and how a prompt becomes text.
      tokenizer: the model's.
      max_tokens: a pair with more tokens is left out and counted.

    Raises:
      ValueError: for a row without a column or with another type there, two answers to different
        prompts, a margin that is no number, a tokenizer without an end-of-sequence token, or if no
        pair is left; the message names file, line and key.
    """
    end = end_of(tokenizer)
    render = prompts.renderer(tokenizer, parts.rendering(config))
    pairs: list[Pair] = []
    too_long, where = 0, "the data"
    for where, record in rows:
        prompt, chosen, rejected = _texts(record, config, where=where)
        tokens = tokenizer.encode(render(prompt, where=where), add_special_tokens=False)
        if not tokens:
            raise ValueError(f"{where}: the prompt has no tokens, so no answer could follow it")
        better, worse = (
            answered(tokens, [*tokenizer.encode(text, add_special_tokens=False), end])
            for text in (chosen, rejected)
        )
        pair = Pair(better, worse, _margin(record, config, where=where))
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


def pack_pairs(pairs: Sequence[Pair], config: SupervisedConfig) -> HostBatch:
    """A batch of at most `train.batch_size` pairs, each within one row, its chosen answer first.
    The advantages of the chosen answer add up to the margin."""
    if config.train.packing:
        rows = assign_rows([p.length for p in pairs], row_length=config.train.row_length)
    else:
        rows = [[i] for i in range(len(pairs))]
    placed, used = rows_for([[a for i in row for a in (2 * i, 2 * i + 1)] for row in rows], config)
    advantages: list[np.ndarray | float] = []
    for pair in pairs:
        margin = np.zeros(len(pair.chosen.completion), np.float32)
        margin[-1] = pair.margin
        advantages += [margin, 0.0]
    batch = pack(
        [answer for pair in pairs for answer in (pair.chosen, pair.rejected)],
        advantages,
        rows=placed,
        row_length=config.train.row_length,
    )
    return HostBatch(batch, used)


def measure_pairs(
    pairs: Sequence[Pair],
    measure: Callable[[Minibatch], Metrics],
    config: SupervisedConfig,
    *,
    layout: Layout,
) -> dict[str, float]:
    """The means over pairs of what `measure` finds in each batch of them; empty without pairs."""
    size = config.train.batch_size
    found: Metrics = {}
    for start in range(0, len(pairs), size):
        batch = pack_pairs(pairs[start : start + size], config)
        found = merge(found, measure(place(batch, layout)))
    return to_floats(found)


def _texts(
    record: Mapping[str, Any], config: PairDataConfig, *, where: str
) -> tuple[Prompt, str, str]:
    """Prompt, chosen and rejected answer."""
    before, answers = [], []
    for key in (config.chosen_key, config.rejected_key):
        value = prompts.prompt_of(record, key, where=where)
        if isinstance(value, list) and value[-1]["role"] != "assistant":
            raise ValueError(f"{where}: the last message of {key!r} is not the assistant's answer")
        before.append([] if isinstance(value, str) else value[:-1])
        answers.append(value if isinstance(value, str) else value[-1]["content"])
    if before[0] != before[1]:
        raise ValueError(
            f"{where}: {config.chosen_key!r} and {config.rejected_key!r} answer different prompts"
        )
    if config.prompt_key is None:
        if not before[0]:
            raise ValueError(
                f"{where}: data.prompt_key = 'none', and {config.chosen_key!r} holds no message "
                "before the answer that could be the prompt"
            )
        return before[0], answers[0], answers[1]
    prompt = prompts.prompt_of(record, config.prompt_key, where=where)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if before[0] not in ([], messages):
        raise ValueError(
            f"{where}: the messages before the answer in {config.chosen_key!r} are not those of "
            f"{config.prompt_key!r}; set data.prompt_key = 'none' if they are the prompt"
        )
    return prompt, answers[0], answers[1]


def _margin(record: Mapping[str, Any], config: PairDataConfig, *, where: str) -> float:
    if not isinstance(config, RankedDataConfig) or config.margin_key is None:
        return 0.0
    value = prompts.column(record, config.margin_key, where=where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"{where}: {config.margin_key!r} is {value!r:.80}, expected a number")
    return float(value)
