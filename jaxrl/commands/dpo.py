"""`jaxrl dpo`: direct preference optimisation."""

import argparse
from collections.abc import Sequence

from jaxrl.commands import full_disk, options, outcome
from jaxrl.commands.paths import fetch_models
from jaxrl.config.preference import DPOConfig

DESCRIPTION = """Trains a model on preference pairs with DPO or one of its variants: the chosen
completion becomes more probable relative to the starting model, the rejected one less. Rerun the
same command to resume an interrupted run.

  jaxrl dpo --model.path DIR --data.path pairs.jsonl --loss ipo --run_dir runs/dpo"""


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.parser_with_file("dpo", DPOConfig, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config = fetch_models(options.parse(parser(), DPOConfig, argv).config)

    from jaxrl.training.supervised.dpo import train_dpo  # takes seconds, so after --help

    with full_disk.one_message(config.run_dir):
        result = train_dpo(config)
    return outcome.print_pairs_outcome(result)
