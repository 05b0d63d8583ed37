"""Fine-tunes a model on texts, with cross-entropy over the completion tokens.
Rerun the same command to resume an interrupted run.

  jaxrl sft --model.path DIR --data.path texts.jsonl --run_dir runs/sft"""

import argparse
import functools
from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.commands.paths import find_inputs
from jaxrl.config.supervised import SFTConfig


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.trainer("sft", SFTConfig, description=__doc__)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, given = options.parse_arguments(parser(), SFTConfig, argv)
    config = find_inputs(config)

    from jaxrl.training.supervised.sft import finetune  # takes seconds, so after --help

    return outcome.run(config, functools.partial(finetune, fork=given.fork), outcome.last_loss)
