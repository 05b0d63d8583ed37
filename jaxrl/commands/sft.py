"""`jaxrl sft`: fine-tunes a model on texts."""

import argparse
from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.commands.paths import find_inputs
from jaxrl.config.supervised import SFTConfig

DESCRIPTION = """Fine-tunes a model on texts, with cross-entropy over the completion tokens.
Rerun the same command to resume an interrupted run.

  jaxrl sft --model.path DIR --data.path texts.jsonl --run_dir runs/sft"""


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.parser_with_file("sft", SFTConfig, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config = find_inputs(options.parse(parser(), SFTConfig, argv).config)

    from jaxrl.commands import supervised  # these take seconds, so after --help
    from jaxrl.training.supervised.sft import finetune

    return supervised.run(config, finetune, outcome.print_loss)
