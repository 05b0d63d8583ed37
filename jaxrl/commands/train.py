"""`jaxrl train`: trains a model with reinforcement learning."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl.commands import options
from jaxrl.config.training import Config

if TYPE_CHECKING:
    from jaxrl.train import Result

DESCRIPTION = """Trains a model with reinforcement learning; a run found in run_dir is continued.

  jaxrl train configs/quickstart.toml --train.steps 50
  jaxrl train --model.path DIR --data.path prompts.jsonl --reward.path my_rewards.py:fn"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit status is 3 after a pause and 4 after a stop by an alarm."""
    made = options.parser_with_file("train", Config, description=DESCRIPTION)
    config = options.parse(made, Config, argv).config

    from jaxrl.core import hosts  # after --help and the config's errors: it takes seconds
    from jaxrl.train import train
    from jaxrl.training import cluster

    with cluster.joined(config.hosts):
        result, leads = train(config), hosts.Hosts().leads
    if leads:
        report(result)
    if result.signum is not None:
        return 128 + result.signum
    return 0 if result.verdict is None else {"pause": 3, "stop": 4}[result.verdict.action]


def report(result: "Result") -> None:
    """Prints how a run ended."""
    if result.signum is not None:
        print(f"ended by signal {result.signum} at step {result.step}; the same command goes on")
        return
    if result.verdict is not None:
        print(result.verdict.message)
        return
    print(f"model: {result.model}")
    if result.initial_accuracy is not None and result.final_accuracy is not None:
        before, after = f"{result.initial_accuracy:.1%}", f"{result.final_accuracy:.1%}"
        print(f"held-out accuracy: {before} -> {after}".replace("%", " %"))
