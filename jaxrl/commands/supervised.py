"""Runs that train on given texts or pairs, from the command line."""

from collections.abc import Callable
from typing import TypeVar

from jaxrl.commands import full_disk
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.hosts import Hosts
from jaxrl.training import cluster
from jaxrl.training.supervised.fit import Result

C = TypeVar("C", bound=SupervisedConfig)


def run(config: C, train: Callable[[C], Result], show: Callable[[Result], int]) -> int:
    """Trains in this process or, with [hosts], in all processes of a run. Process 0 prints the
    outcome with `show`, which returns the exit status."""
    with full_disk.one_message(config.run_dir), cluster.joined(config.hosts):
        result, leads = train(config), Hosts().leads
    if leads:
        return show(result)
    return 0 if result.signum is None else 128 + result.signum
