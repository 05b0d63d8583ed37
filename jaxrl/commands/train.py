"""Trains a model with reinforcement learning. Rerun the same command to resume an
interrupted run. The exit status is 3 after an alarm paused the run and 4 after one stopped it.

  jaxrl train configs/quickstart.toml --train.steps 50
  jaxrl train --model.path DIR --data.path prompts.jsonl --reward.path my_rewards.py:fn"""

import argparse
import functools
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl.commands import options, outcome
from jaxrl.commands.paths import find_inputs
from jaxrl.config.training import Config
from jaxrl.fleet.membership import membership

if TYPE_CHECKING:
    from jaxrl.train import Result


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    return options.trainer("train", Config, description=__doc__)


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit status is 3 after a pause and 4 after a stop by an alarm."""
    config, given = options.parse_arguments(parser(), Config, argv)
    config = find_inputs(config)
    if config.fleet.engine is not None and membership() is None:
        from jaxrl.fleet.launch import launch

        return launch(config, argv)

    from jaxrl.builders.layout import prepare_devices  # these take seconds, so after --help
    from jaxrl.train import train

    prepare_devices(config.mesh, config.sampler, apart=config.devices_apart)
    return outcome.run(
        config,
        functools.partial(train, fork=given.fork),
        functools.partial(_conclude, run_dir=config.run_dir),
    )


def _conclude(result: "Result", *, run_dir: str) -> tuple[str, int]:
    """Tells the model's directory and accuracy, or why an alarm ended the run. If an earlier
    checkpoint was better on held-out data, the last line is the command that exports it."""
    if result.verdict is not None:
        return result.verdict.message, {"pause": 3, "stop": 4}[result.verdict.action]
    lines = [f"model: {result.model}"]
    before, after = result.initial_accuracy, result.final_accuracy
    if before is not None and after is not None:
        failed = (result.initial_failed, result.final_failed)
        change = outcome.change(before, after, failed=failed, of=result.held_out)
        lines.append(f"held-out accuracy: {change}")
        if result.best is not None and result.best[1] > after:
            step, accuracy = result.best
            best = f"best {accuracy:.1%} at step {step}".replace("%", " %")
            lines.append(f"{best}: jaxrl export {shlex.quote(run_dir)} OUT --step best")
    return "\n".join(lines), 0
