"""`jaxrl plan`: says whether a run fits, before there are chips."""

from collections.abc import Sequence
from typing import Any

from pydantic import model_validator

from jaxrl.commands import options
from jaxrl.config.training import Config

DESCRIPTION = """Compiles a run's step for devices that need not exist, and says what it takes.

  jaxrl plan configs/qwen3_8b.toml --topology v5p:4x4x4
  jaxrl plan configs/qwen3_8b.toml --topology cpu:8 --mesh.fsdp 8
  jaxrl plan configs/qwen3_8b.toml --estimate --rollout-seconds 60 --train-seconds 40

Of models only config.json is read, of data and reward functions nothing: data.path and reward.path
may be left out. TPU topologies (v5e, v5p, v6e) need libtpu, which works without a TPU:
pip install 'jax[tpu]'. The exit status is 5 if the run does not fit. The last line is such as

  peak 31.4 GiB of 95.7 GiB per chip: fits"""


DOES_NOT_FIT = 5  # 1 and 2 are errors, 3 and 4 what alarms do to a run


class PlanConfig(Config):
    """A run whose data and reward functions may be left open."""

    @model_validator(mode="before")
    @classmethod
    def _left_open(cls, tree: Any) -> Any:
        left_open: dict[str, Any] = {"data": {"path": "any"}, "reward": {"path": ["any"]}}
        given = {name: tree.get(name, {}) for name in left_open}
        tables = {k: left_open[k] | v for k, v in given.items() if isinstance(v, dict)}
        return {**tree, **tables}


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit status is 5 if the run does not fit."""
    made = options.parser_with_file("plan", PlanConfig, description=DESCRIPTION)
    made.add_argument("--topology", help="chips to compile for, such as v5p:4x4x4 or cpu:8")
    made.add_argument("--estimate", action="store_true", help="do not compile, only calculate")
    made.add_argument("--link", type=float, default=50, help="GB/s to the samplers (default: 50)")
    made.add_argument(
        "--chip-memory", type=float, default=80, help="GB of a chip, for --estimate (default: 80)"
    )
    for name in ("rollout", "train"):
        made.add_argument(
            f"--{name}-seconds", type=float, help=f"a {name} phase, for --estimate's utilisation"
        )
    made.add_argument(
        "--staleness",
        help="for --estimate: what was observed, staleness:improvement:utilisation,...",
    )
    config, given = options.parse(made, PlanConfig, argv)
    if (given.topology is None) != given.estimate:
        made.error("give one of --topology and --estimate")
    if (given.rollout_seconds is None) != (given.train_seconds is None):
        made.error("--rollout-seconds and --train-seconds go together")
    if given.link <= 0 or given.chip_memory <= 0:
        made.error("--link and --chip-memory must be more than 0")

    # After --help and the config's errors: it takes seconds.
    if given.estimate:
        from jaxrl.commands.plan.estimate import Phases, estimate, read_observed

        phases = None
        if given.rollout_seconds is not None:
            phases = Phases(rollout=given.rollout_seconds, train=given.train_seconds)
        print(
            estimate(
                config,
                chip_memory=given.chip_memory * 1e9,
                link_rate=given.link * 1e9,
                phases=phases,
                observed=None if given.staleness is None else read_observed(given.staleness),
            )
        )
        return 0
    from jaxrl.commands.plan.topology import open_topology

    topology = open_topology(given.topology)
    from jaxrl.commands.plan.program import compile_step
    from jaxrl.commands.plan.text import fits, report

    program = compile_step(config, topology)
    print(report(config, topology, program, link_rate=given.link * 1e9))
    return 0 if fits(program, topology) else DOES_NOT_FIT
