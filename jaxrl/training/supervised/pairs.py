"""Loads, packs and measures preference pairs as a config says."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrl.builders.prompts import rendering
from jaxrl.config.preference import PairDataConfig, RankedDataConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import Metrics, merge, to_floats
from jaxrl.core.packing import assign_rows, pack
from jaxrl.data import prompts
from jaxrl.data.pairs import Pair, PairColumns, Pairs, read_pairs
from jaxrl.data.prompts import Row, Tokenizer
from jaxrl.training.supervised.fit import HostBatch, place, rows_for
from sharding.partition import Layout


def load_training_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Pairs:
    """The pairs under `data.path`; raises as `read_pairs`."""
    rows = prompts.read_rows(config.path, split=config.split, subset=config.subset)
    return tokenise(rows, config, tokenizer, max_tokens=max_tokens)


def load_held_out_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Pairs:
    """The pairs under `data.eval_path`, none without it; raises as `read_pairs`."""
    if config.eval_path is None:
        return Pairs([], 0)
    rows = prompts.read_rows(config.eval_path, split=config.eval_split, subset=config.subset)
    found = tokenise(rows, config, tokenizer, max_tokens=max_tokens)
    return found._replace(pairs=found.pairs[: config.eval_limit])


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


def tokenise(
    rows: Iterator[Row], config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int
) -> Pairs:
    """Tokenises rows with the columns and the rendering of a config; raises as `read_pairs`."""
    columns = PairColumns(config.prompt_key, config.chosen_key, config.rejected_key)
    if isinstance(config, RankedDataConfig):
        columns = columns._replace(margin=config.margin_key)
    return read_pairs(
        rows, tokenizer, columns=columns, rendering=rendering(config), max_tokens=max_tokens
    )
