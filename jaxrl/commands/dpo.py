"""Trains a model on preference pairs with DPO or one of its variants: the chosen
completion becomes more probable relative to the starting model, the rejected one less. Rerun the
same command to resume an interrupted run.

  jaxrl dpo --model.path DIR --data.path pairs.jsonl --loss ipo --run_dir runs/dpo"""

import argparse
import functools
from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.commands.paths import find_inputs
from jaxrl.config.preference import DPOConfig


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.trainer("dpo", DPOConfig, description=__doc__)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, given = options.parse_arguments(parser(), DPOConfig, argv)
    config = find_inputs(config)

    from jaxrl.training.supervised.dpo import train_dpo  # takes seconds, so after --help

    train = functools.partial(train_dpo, fork=given.fork)
    return outcome.run(config, train, outcome.held_out_accuracy)
