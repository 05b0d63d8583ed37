"""The resources that a fleet asks of a cluster, and those that the cluster lacks."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl.config.fleet import FleetConfig, Resources, read_resources


class Request(NamedTuple):
    """Actors of a fleet that need the same."""

    role: str  # in words: "learner host", "server" or "worker"
    count: int
    each: Resources

    @property
    def text(self) -> str:
        """Describes it, such as "2 learner hosts (GPU 8, CPU 16 each)"."""
        plural = "s" * (self.count > 1)
        return f"{self.count} {self.role}{plural} ({_amounts(self.each)}{' each' * bool(plural)})"


LEARNER, SERVER, WORKER = "learner host", "server", "worker"


def requests(config: FleetConfig) -> list[Request]:
    """Returns what a config asks for. The hosts of a TPU slice are not among it: Ray
    knows them by the topology."""
    asked = [
        (LEARNER, 0 if config.learner_slice else config.learners, config.learner_resources),
        (SERVER, config.servers, config.server_resources),
        (WORKER, config.workers, config.worker_resources),
    ]
    return [Request(role, count, read_resources(texts)) for role, count, texts in asked if count]


def text_of(asked: Sequence[Request]) -> str:
    """Describes all that is asked for."""
    return ", ".join(one.text for one in asked)


def lacking(asked: Sequence[Request], nodes: Sequence[Resources]) -> list[str]:
    """Returns one line for each resource of which the cluster has too little, and for each actor
    that fits no node: with what is asked for and what is there."""
    found = []
    names = dict.fromkeys(name for one in asked for name in one.each)
    for name in names:
        total = sum(one.count * one.each.get(name, 0.0) for one in asked)
        there = sum(node.get(name, 0.0) for node in nodes)
        if total > there:
            parts = [
                f"{one.count} {one.role}{'s' * (one.count > 1)} x {one.each[name]:g}"
                for one in asked
                if name in one.each
            ]
            found.append(
                f"{name}: {total:g} asked for ({' + '.join(parts)}), and the cluster has {there:g}"
            )
    for one in asked if not found else ():
        if not any(_fits(one.each, node) for node in nodes):
            found.append(
                f"a {one.role} asks for {_amounts(one.each)}, and no node has as much; the nodes "
                f"have {'; '.join(sorted({_amounts(node) for node in nodes}))}"
            )
    return found


def _fits(each: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in each.items())


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
