"""Trains a reward model on preference pairs (Bradley-Terry): the chosen completion
gets the higher score. The result is a Hugging Face model with one label, for
`jaxrl train --reward.model`. Rerun the same command to resume an interrupted run.

  jaxrl reward-model --model.path DIR --data.path pairs.jsonl --run_dir runs/reward_model"""

import argparse
import functools
from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.commands.paths import find_inputs
from jaxrl.config.preference import RewardModelConfig


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.trainer("reward-model", RewardModelConfig, description=__doc__)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, given = options.parse_arguments(parser(), RewardModelConfig, argv)
    config = find_inputs(config)

    # Takes seconds, so after --help.
    from jaxrl.training.supervised.reward_model import train_reward_model

    train = functools.partial(train_reward_model, fork=given.fork)
    return outcome.run(config, train, outcome.held_out_accuracy)
