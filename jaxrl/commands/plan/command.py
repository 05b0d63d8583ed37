"""Compiles a run's step for chips that you do not have. Prints its memory and speed.

  jaxrl plan configs/qwen3_8b.toml --topology v5p:4x4x4
  jaxrl plan configs/qwen3_8b.toml --topology h100:8 --mesh.fsdp 8
  jaxrl plan configs/qwen3_8b.toml --topology cpu:8 --mesh.fsdp 8
  jaxrl plan configs/qwen3_8b.toml --estimate --rollout-seconds 60 --train-seconds 40

With fleet.engine, and neither --topology nor --estimate, it says what the fleet will ask for and
whether the cluster has it.

It reads the model's config.json, but neither weights, data nor reward functions: data.path and
reward.path are optional. TPU topologies (v5e, v5p, v6e, tpu7x) need libtpu: pip install 'jax[tpu]'.
GPUs (a100, h100, h200, b200) need jax-cuda12-pjrt in jax's version, and attention by cudnn also
jax-cuda12-plugin and nvidia-cudnn-cu12. Both work without the chips. The exit status is 5 if the
run does not fit. The last line looks like

  peak 31.4 GiB of 95.7 GiB per chip: fits"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from pydantic import model_validator

from jaxrl.commands import options
from jaxrl.commands.paths import fetch_models
from jaxrl.commands.plan.chips import GIB
from jaxrl.commands.plan.estimate import estimate
from jaxrl.commands.plan.topology import open_topology
from jaxrl.config.training import Config
from jaxrl.huggingface import hub

DOES_NOT_FIT = 5  # exit status; see jaxrl.cli for the others


class PlanConfig(Config):
    """Config of a run whose data and rewards are optional."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        optional: dict[str, Any] = {"data": {"path": "any"}, "reward": {"path": ["any"]}}
        given = {name: tree.get(name, {}) for name in optional}
        tables = {k: optional[k] | v for k, v in given.items() if isinstance(v, dict)}
        return {**tree, **tables}


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser_with_file("plan", PlanConfig, description=__doc__)
    made.add_argument("--topology", help="chips to compile for, such as v5p:4x4x4, h100:8 or cpu:8")
    made.add_argument("--estimate", action="store_true", help="calculate without compiling")
    made.add_argument(
        "--link", type=float, default=50, help="GB/s from the learner to the samplers (default: 50)"
    )
    made.add_argument(
        "--chip-memory", type=float, default=80, help="GiB per chip for --estimate (default: 80)"
    )
    for name in ("rollout", "train"):
        made.add_argument(
            f"--{name}-seconds",
            type=float,
            help=f"length of the {name} phase, to estimate utilisation",
        )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit status is 5 if the run does not fit."""
    made = parser()
    config, given = options.parse_arguments(made, PlanConfig, argv)
    fleet = config.fleet.engine is not None and given.topology is None and not given.estimate
    if not fleet and (given.topology is None) != given.estimate:
        made.error("give either --topology or --estimate")
    if (given.rollout_seconds is None) != (given.train_seconds is None):
        made.error("--rollout-seconds and --train-seconds go together")
    if given.rollout_seconds is not None and not given.estimate:
        made.error("--rollout-seconds and --train-seconds need --estimate")
    for name in ("link", "chip_memory", "rollout_seconds", "train_seconds"):
        number = getattr(given, name)
        if number is not None and not 0 < number < math.inf:
            made.error(f"--{name.replace('_', '-')} {number:g}: expected a positive number")
    if fleet:
        from jaxrl.fleet.plan import fleet_plan

        plan = fleet_plan(config.fleet)
        print(plan.text)
        return 0 if plan.fits else DOES_NOT_FIT
    config, link = fetch_models(config, files=hub.CONFIGS), given.link * 1e9

    if given.estimate:
        phases = None
        if given.rollout_seconds is not None:
            phases = given.rollout_seconds, given.train_seconds
        print(estimate(config, chip_memory=given.chip_memory * GIB, link_rate=link, phases=phases))
        return 0
    topology = open_topology(given.topology)

    from jaxrl.commands.plan.program import compile_step  # after JAX has its platform
    from jaxrl.commands.plan.text import fits, plan_text

    program = compile_step(config, topology)
    print(plan_text(config, topology, program, link_rate=link))
    return 0 if fits(program, topology) else DOES_NOT_FIT
