"""`jaxrl dpo`: direct preference optimisation on pairs of answers."""

from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.config.preference import DPOConfig

DESCRIPTION = """Tunes a model on pairs of answers (DPO and its relatives): the chosen one shall
become more probable against the model that the run begins with; a run found in run_dir goes on.

  jaxrl dpo --model.path DIR --data.path pairs.jsonl --loss ipo --run_dir runs/dpo"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser_with_file("dpo", DPOConfig, description=DESCRIPTION)
    config = options.parse(made, DPOConfig, argv).config

    # After --help and the config's errors: it takes seconds.
    from jaxrl.training.supervised.dpo import train_dpo

    return outcome.report_pairs(train_dpo(config))
