"""Runs of the commands that train, and the last lines that they print."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from jaxrl.commands import full_disk
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import Hosts
from jaxrl.training import cluster

if TYPE_CHECKING:
    import jaxrl.train
    from jaxrl.training.supervised import fit

C = TypeVar("C", bound=Config | SupervisedConfig)
R = TypeVar("R", bound="jaxrl.train.Result | fit.Result")


def run(config: C, train: Callable[[C], R], conclude: Callable[[R], tuple[str, int]]) -> int:
    """Trains in this process or, with [hosts], in all processes of a run; returns the exit status.

    Process 0 prints the outcome. `conclude` returns its text and the status of a run that no signal
    ended.
    """
    with full_disk.one_message(config.run_dir), cluster.joined(config.hosts):
        result, leads = train(config), Hosts().leads
    if (signum := result.signum) is not None:
        again = "rerun the same command to resume"
        text, status = f"ended by signal {signum} at step {result.step}; {again}", 128 + signum
    else:
        text, status = conclude(result)
    if leads:
        print(text)
    return status


def last_loss(result: "fit.Result") -> tuple[str, int]:
    """Concludes a run on texts."""
    found = result.last.get("loss", float("nan"))
    return f"loss {found:.4f} nats per token; model: {result.model}", 0


def held_out_accuracy(result: "fit.Result") -> tuple[str, int]:
    """Concludes a run on preference pairs; without held-out ones it tells the last loss."""
    before, after = result.first.get("accuracy"), result.last.get("eval/accuracy")
    text = f"loss {result.last.get('loss', float('nan')):.4f}"
    if before is not None and after is not None:
        text = f"held-out pairs ranked correctly: {change(before, after)}"
    return f"{text}; model: {result.model}", 0


def change(before: float, after: float) -> str:
    """Formats two shares as "27.5 % -> 98.0 %"."""
    return f"{before:.1%} -> {after:.1%}".replace("%", " %")
