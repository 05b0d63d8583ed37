"""`jaxrl reward-model`: trains a reward model on pairs of answers."""

from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.config.preference import RewardModelConfig

DESCRIPTION = """Trains a reward model on pairs of answers (Bradley-Terry): the chosen one shall be
worth more. It is saved as a Hugging Face model with one label, for `jaxrl train --reward.model`; a
run found in run_dir is continued.

  jaxrl reward-model --model.path DIR --data.path pairs.jsonl --run_dir runs/reward_model"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser_with_file("reward-model", RewardModelConfig, description=DESCRIPTION)
    config = options.parse(made, RewardModelConfig, argv).config

    # After --help and the config's errors: it takes seconds.
    from jaxrl.training.supervised.reward_model import train_reward_model

    return outcome.report_pairs(train_reward_model(config))
