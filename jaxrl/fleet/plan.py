"""Says what a fleet will ask for, and whether the cluster has it."""

import os
from typing import NamedTuple

from jaxrl.config.fleet import FleetConfig, Resources
from jaxrl.fleet.engine import import_ray, nodes, running
from jaxrl.fleet.request import lacking, requests, text_of


class FleetPlan(NamedTuple):
    """The request of a fleet beside a cluster."""

    text: str  # for people
    fits: bool


def fleet_plan(config: FleetConfig) -> FleetPlan:
    """Compares the config's request with the cluster at RAY_ADDRESS or on this machine, or with the
    processors of this machine, where a run would start one. Starts nothing.

    Raises:
      RuntimeError: if the cluster at RAY_ADDRESS cannot be reached.
      ModuleNotFoundError: without Ray.
    """
    asked = requests(config)
    lines = [f"fleet asks for: {text_of(asked)}"] if asked else []
    if running(namespace="plan"):
        try:
            there, where = nodes(), "the Ray cluster"
        finally:
            import_ray().shutdown()
    else:
        there, where = [_this_machine()], "this machine, where the run starts Ray, without GPUs"
    missing = lacking(asked, there)
    lines.append(f"{where} has: {'; '.join(_text(node) for node in there)}")
    if config.learner_slice is not None:
        lines.append(f"and for the TPU slice {config.learner_slice}, which Ray finds at the start")
    lines += [f"lacking: {line}" for line in missing] or ["all of it is there"]
    return FleetPlan("\n".join(lines), not missing)


def _this_machine() -> Resources:
    return {"CPU": float(os.cpu_count() or 1)}


def _text(node: Resources) -> str:
    own = (f"{name} {amount:g}" for name, amount in sorted(node.items()))
    return ", ".join(own) or "nothing"
