"""`jaxrl train`: trains a model with reinforcement learning."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl.commands import full_disk, options, outcome
from jaxrl.config.training import Config

if TYPE_CHECKING:
    from jaxrl.train import Result

DESCRIPTION = """Trains a model with reinforcement learning. Rerun the same command to resume an
interrupted run. The exit status is 3 after an alarm paused the run and 4 after one stopped it.

  jaxrl train configs/quickstart.toml --train.steps 50
  jaxrl train --model.path DIR --data.path prompts.jsonl --reward.path my_rewards.py:fn"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit status is 3 after a pause and 4 after a stop by an alarm."""
    made = options.parser_with_file("train", Config, description=DESCRIPTION)
    config = options.parse(made, Config, argv).config

    from jaxrl.builders.layout import divide_cpu  # these take seconds, so after --help
    from jaxrl.core import hosts
    from jaxrl.train import train
    from jaxrl.training import cluster

    divide_cpu(config)
    with full_disk.one_message(config.run_dir), cluster.joined(config.hosts):
        result, leads = train(config), hosts.Hosts().leads
    if leads:
        print_result(result)
    if result.signum is not None:
        return 128 + result.signum
    return 0 if result.verdict is None else {"pause": 3, "stop": 4}[result.verdict.action]


def print_result(result: "Result") -> None:
    """Prints the model's directory and accuracy, or why the run ended early."""
    if result.signum is not None:
        print(outcome.interrupted(result.signum, step=result.step))
        return
    if result.verdict is not None:
        print(result.verdict.message)
        return
    print(f"model: {result.model}")
    before, after = result.initial_accuracy, result.final_accuracy
    if before is not None and after is not None:
        print(f"held-out accuracy: {outcome.change(before, after)}")
