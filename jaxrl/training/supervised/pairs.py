"""Runs on preference pairs: loads, packs and measures them."""

import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.builders.prompts import read_data, rendering
from jaxrl.builders.supervised import Setup, supervised_shape
from jaxrl.config.preference import DPOConfig, PairDataConfig, RankedDataConfig, RewardModelConfig
from jaxrl.core import Hosts, Metrics, Minibatch, MinibatchShape, merge, pack_minibatch, to_floats
from jaxrl.data import Pair, PairColumns, Pairs, Row, Tokenizer, read_pairs
from jaxrl.models import Params
from jaxrl.training.supervised.fit import FitResult, Task, end_notes, fit, look_notes, too_long_note


class PairData(NamedTuple):
    """The pairs of `data.path` and of `data.eval_path`; `held_out` is empty without the latter."""

    training: Pairs
    held_out: Pairs


def load_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> PairData:
    """Reads and tokenizes training and held-out pairs on process 0; raises as `read_pairs`."""
    if not Hosts().leads:
        return PairData(Pairs([], 0), Pairs([], 0))
    rows = read_data(config.path, key="data.path")
    training = tokenize(rows, tokenizer, config=config, max_tokens=max_tokens)
    if config.eval_path is None:
        return PairData(training, Pairs([], 0))
    rows = read_data(config.eval_path, split="test", key="data.eval_path")
    held_out = tokenize(rows, tokenizer, config=config, max_tokens=max_tokens)
    return PairData(training, held_out._replace(pairs=held_out.pairs[: config.eval_limit]))


def tokenize(
    rows: Iterator[Row], tokenizer: Tokenizer, *, config: PairDataConfig, max_tokens: int
) -> Pairs:
    """Tokenizes rows with the columns and the rendering of a config; raises as `read_pairs`."""
    columns = PairColumns(config.prompt_key, config.chosen_key, config.rejected_key)
    if isinstance(config, RankedDataConfig):
        columns = columns._replace(margin=config.margin_key)
    return read_pairs(
        rows, tokenizer, columns=columns, rendering=rendering(config), max_tokens=max_tokens
    )


def pack_pairs(pairs: Sequence[Pair], *, shape: MinibatchShape) -> Minibatch:
    """Packs each pair into a row, the chosen completion first; its advantages sum to the margin."""
    advantages: list[np.ndarray | float] = []
    for pair in pairs:
        margin = np.zeros(len(pair.chosen.completion), np.float32)
        margin[-1] = pair.margin
        advantages += [margin, 0.0]
    sequences = [one for pair in pairs for one in (pair.chosen, pair.rejected)]
    return pack_minibatch(sequences, advantages, shape=shape)


def fit_pairs(
    config: DPOConfig | RewardModelConfig,
    data: PairData,
    *,
    setup: Setup,
    measure: Callable[[Params, Minibatch], Metrics],
    **task: Any,
) -> FitResult:
    """Trains on pairs as `fit`; `task` has the attributes of `Task` that are not made here."""
    size, hosts, held_out = config.train.batch_size, setup.hosts, data.held_out.pairs
    pack = functools.partial(
        pack_pairs,
        shape=supervised_shape(config, sizes=setup.model.config, layout=setup.layout, together=2),
    )
    count = hosts.share(len(held_out))

    def measured(params: Params) -> dict[str, float]:
        found = Metrics()
        for start in range(0, count, size):
            some = hosts.share(held_out[start : start + size])
            found = merge(found, measure(params, pack(some)))
        return to_floats(found)

    made = Task(
        setup=setup,
        rows=data.training.pairs,
        pack=pack,
        measure=measured,
        held_out=held_out,
        eval_every=config.eval.interval(config.train.steps) if count else 0,
        lengths=array("q", (one.length for one in data.training.pairs)),
        details=[
            *look_notes(setup.checkpoint.tokenizer, [p.chosen for p in data.training.pairs[:1]]),
            *end_notes(setup, rendering(config.data)),
        ],
        notes=[
            *too_long_note("data.path", data.training.too_long, config=config),
            *too_long_note("data.eval_path", data.held_out.too_long, config=config),
        ],
        **task,
    )
    return fit(config, made)
