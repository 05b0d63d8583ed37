"""Reserves the resources of a fleet in a cluster, or says which are missing."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from jaxrl.config.fleet import FleetConfig, Resources
from jaxrl.fleet.engine import Cluster, free, import_ray, nodes
from jaxrl.fleet.request import LEARNER, Request, lacking, requests, text_of
from jaxrl.fleet.signals import Signals

_POLL = 2.0  # seconds between two looks at a cluster that lacks something


class Slot(NamedTuple):
    """The reserved resources of one actor."""

    group: Any  # Ray's placement group
    index: int  # of the bundle in it
    resources: Resources

    def actor(self, kind: type, **options: Any) -> Any:
        """Returns Ray's class of actors, which start here."""
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {k: v for k, v in self.resources.items() if k not in ("CPU", "GPU")}
        return ray.remote(kind).options(
            num_cpus=self.resources.get("CPU", 0),
            num_gpus=self.resources.get("GPU", 0),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.index
            ),
            **options,
        )


Slots = dict[str, list[Slot]]
"""The slots of each role."""


class UnplacedError(ValueError):
    """The cluster lacks resources."""


@contextmanager
def reserved(
    config: FleetConfig, cluster: Cluster, *, signals: Signals, note: Callable[[str], None]
) -> Iterator[Slots]:
    """Yields the slots of a config's actors, which are free again after the block.

    Raises:
      UnplacedError: if the cluster has not enough, at once in one that was started here, else after
        `fleet.wait` seconds; the message names each resource.
    """
    ray = import_ray()
    asked = requests(config)
    _wait_for_nodes(asked, config, cluster, signals=signals, note=note)
    slots: Slots = {}
    with ExitStack() as stack:
        if config.learner_slice is not None:
            slots[LEARNER] = _reserve_slice(config, stack)
        bundles = [(one.role, one.each) for one in asked for _ in range(one.count)]
        if bundles:
            group = ray.util.placement_group([each for _, each in bundles], strategy="SPREAD")
            stack.callback(ray.util.remove_placement_group, group)
            for index, (role, each) in enumerate(bundles):
                slots.setdefault(role, []).append(Slot(group, index, each))
        groups = {id(one.group): one.group for some in slots.values() for one in some}
        ready = [group.ready() for group in groups.values()]
        if not signals.wait(ready, seconds=config.wait):
            raise UnplacedError(unplaced(asked, config))
        yield slots


def unplaced(asked: Sequence[Request], config: FleetConfig) -> str:
    """Describes what could not be placed in time."""
    there = ", ".join(f"{name} {amount:g}" for name, amount in sorted(free().items())) or "nothing"
    if config.learner_slice is not None:
        there = f"{there}; fleet.learner_slice = {config.learner_slice!r}"
    return (
        f"the Ray cluster could not place {text_of(asked)} within fleet.wait = {config.wait:g} s, "
        f"because others use it or no node has that much at once; free are: {there}. Ask for "
        "less, add nodes, or raise fleet.wait"
    )


def _wait_for_nodes(
    asked: Sequence[Request],
    config: FleetConfig,
    cluster: Cluster,
    *,
    signals: Signals,
    note: Callable[[str], None],
) -> None:
    until = time.monotonic() + (0.0 if cluster.started else config.wait)
    noted = False
    while missing := lacking(asked, nodes()):
        text = "; ".join(missing)
        if time.monotonic() >= until:
            where = "this machine has too little" if cluster.started else "the Ray cluster lacks"
            raise UnplacedError(
                f"{where}: {text}. Lower [fleet]'s counts or resources, or use a larger cluster "
                "(RAY_ADDRESS)"
            )
        if not noted:
            note(f"waiting up to {config.wait:g} s for nodes: {text}")
            noted = True
        signals.sleep(_POLL)


def _reserve_slice(config: FleetConfig, stack: ExitStack) -> list[Slot]:
    """Reserves the hosts of a TPU slice by Ray's own support for them."""
    from ray.util.tpu import slice_placement_group

    generation, _, topology = (config.learner_slice or "").partition(":")
    try:
        found = slice_placement_group(topology, generation, head_reservation_timeout_s=config.wait)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise UnplacedError(
            f"fleet.learner_slice = {config.learner_slice!r} cannot be placed: {error}"
        ) from error
    stack.callback(found.shutdown)
    each = {name: float(amount) for name, amount in found.bundle_resources.items()}
    return [Slot(found.slice_placement_group, i, each) for i in range(found.num_bundles)]
