"""`jaxrl train`: trains a model with reinforcement learning."""

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl.commands import full_disk, options, outcome
from jaxrl.commands.paths import find_inputs
from jaxrl.config.training import Config

if TYPE_CHECKING:
    from jaxrl.train import Result

DESCRIPTION = """Trains a model with reinforcement learning. Rerun the same command to resume an
interrupted run. The exit status is 3 after an alarm paused the run and 4 after one stopped it.

  jaxrl train configs/quickstart.toml --train.steps 50
  jaxrl train --model.path DIR --data.path prompts.jsonl --reward.path my_rewards.py:fn"""


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.parser_with_file("train", Config, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit status is 3 after a pause and 4 after a stop by an alarm."""
    config = find_inputs(options.parse(parser(), Config, argv).config)

    from jaxrl.builders.layout import divide_cpu  # these take seconds, so after --help
    from jaxrl.core import hosts
    from jaxrl.train import train
    from jaxrl.training import cluster

    divide_cpu(config)
    with full_disk.one_message(config.run_dir), cluster.joined(config.hosts):
        result, leads = train(config), hosts.Hosts().leads
    if leads:
        print_result(result, run_dir=config.run_dir)
    if result.signum is not None:
        return 128 + result.signum
    return 0 if result.verdict is None else {"pause": 3, "stop": 4}[result.verdict.action]


def print_result(result: "Result", *, run_dir: str) -> None:
    """Prints the model's directory and accuracy, or why the run ended early. If an earlier
    checkpoint was better on held-out data, the last line is the command that exports it."""
    if result.signum is not None:
        print(outcome.interrupted(result.signum, step=result.step))
        return
    if result.verdict is not None:
        print(result.verdict.message)
        return
    print(f"model: {result.model}")
    before, after = result.initial_accuracy, result.final_accuracy
    if before is None or after is None:
        return
    print(f"held-out accuracy: {outcome.change(before, after)}")
    if result.best is not None and result.best[1] > after:
        step, accuracy = result.best
        best = f"best {accuracy:.1%} at step {step}".replace("%", " %")
        print(f"{best}: jaxrl export {shlex.quote(run_dir)} OUT --step best")
