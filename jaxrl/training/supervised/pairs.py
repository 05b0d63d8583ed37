"""Loads, packs and measures preference pairs."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrl.builders.prompts import rendering
from jaxrl.config.preference import PairDataConfig, RankedDataConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import Metrics, merge, to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.data import prompts
from jaxrl.data.pairs import Pair, PairColumns, Pairs, read_pairs
from jaxrl.data.prompts import Row, Tokenizer
from jaxrl.training.supervised.fit import batch_indices


def load_training_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Pairs:
    """Reads and tokenizes the pairs of `data.path`; raises as `read_pairs`."""
    rows = prompts.read_rows(config.path)
    return tokenize(rows, tokenizer, config=config, max_tokens=max_tokens)


def load_held_out_pairs(config: PairDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Pairs:
    """Reads and tokenizes the pairs of `data.eval_path`, if any; raises as `read_pairs`."""
    if config.eval_path is None:
        return Pairs([], 0)
    rows = prompts.read_rows(config.eval_path, split="test")
    found = tokenize(rows, tokenizer, config=config, max_tokens=max_tokens)
    return found._replace(pairs=found.pairs[: config.eval_limit])


def pack_pairs(pairs: Sequence[Pair], *, shape: MinibatchShape) -> Minibatch:
    """Packs pairs, each within one row, the chosen completion first. The advantages of the chosen
    completion add up to the margin.

    Args:
      pairs: at most as many as the shape has rows.
      shape: with two sequences `together`.
    """
    advantages: list[np.ndarray | float] = []
    for pair in pairs:
        margin = np.zeros(len(pair.chosen.completion), np.float32)
        margin[-1] = pair.margin
        advantages += [margin, 0.0]
    sequences = [one for pair in pairs for one in (pair.chosen, pair.rejected)]
    return pack_minibatch(sequences, advantages, shape=shape)


def pair_batches(
    pairs: Sequence[Pair], config: SupervisedConfig, *, shape: MinibatchShape
) -> Callable[[int], Minibatch]:
    """Returns the function from an optimizer step to its minibatch of pairs."""

    def batch(step: int) -> Minibatch:
        indices = batch_indices(len(pairs), step=step, config=config)
        return pack_pairs([pairs[i] for i in indices], shape=shape)

    return batch


def measure_pairs(
    pairs: Sequence[Pair],
    measure: Callable[[Minibatch], Metrics],
    *,
    batch_size: int,
    shape: MinibatchShape,
) -> dict[str, float]:
    """Measures batches of pairs and merges the results; empty without pairs."""
    found: Metrics = {}
    for start in range(0, len(pairs), batch_size):
        batch = pack_pairs(pairs[start : start + batch_size], shape=shape)
        found = merge(found, measure(batch))
    return to_floats(found)


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
