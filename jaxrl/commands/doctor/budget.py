"""The frontier of `jaxrl doctor --budget`: the cheapest dtype policy whose beta stays under it."""

import json
from collections.abc import Callable, Sequence
from math import isnan, prod
from pathlib import Path

import jax

from jaxrl.commands.doctor.compiled import compiled_costs
from jaxrl.commands.doctor.measure import examine
from jaxrl.commands.doctor.text import columns
from jaxrl.commands.plan.chips import GPUS
from jaxrl.commands.plan.topology import open_topology
from jaxrl.commands.plan.units import time_text
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.toml_file import ConfigError
from jaxrl.diagnostics import Choice, candidates, cheapest, draw_frontier, frontier
from jaxrl.huggingface import Checkpoint

_BLOCKS = {"embedded": ("e4m3", "int8"), "vllm": ("int8",), "vllm_tpu": ()}  # by sampler
_MEASURED = "seconds of a training step on this device, after compilation"
_COMPILED = {
    "tpu": "seconds of a training step on {}, as its compiler estimates them",
    "gpu": "seconds of a training step on {}: products or bytes of each instruction at full rate",
}


def spend(
    config: DoctorConfig, *, bound: float, topology: str | None, note: Callable[[str], None]
) -> int:
    """Measures beta of each candidate here, and a step of each on the chips of `topology` or, if
    that is None, here. Prints the frontier, and writes budget.json and budget.png. Candidates are
    the config's precisions, if it names any. The exit status is 3 if no beta stays under the bound,
    in nats.

    Raises:
      ConfigError: for a topology without a data sheet.
      ValueError, ServerFailedError, RefusedError, ModuleNotFoundError: as `examine` and
        `open_topology`.
    """
    if topology is None:
        timed = {"timed_steps": max(2, config.timed_steps)}
        config = _with_candidates(
            config, jax.default_backend(), devices=prod(config.mesh.sizes.values())
        )
        measured, cost = examine(config.model_copy(update=timed), note=note), _MEASURED
        seconds = {m.precision: m.numbers["seconds_per_step"] for m in measured}
    else:
        platform = _platform(topology)
        opened, cost = open_topology(topology), _COMPILED[platform].format(topology)
        config = _with_candidates(config, platform, devices=len(opened.devices))
        # [mesh] arranges the chips; beta is measured on one device.
        here = {"timed_steps": 0, "mesh": MeshConfig()}
        measured = examine(config.model_copy(update=here), note=note)
        seconds = compiled_costs(config, opened, note=note)
    choices = [
        Choice(m.precision, m.numbers["beta_std"], seconds[m.precision])
        for m in measured
        if m.precision in seconds
    ]
    if not choices:
        raise ValueError(f"--topology {topology}: no candidate has a step that compiles and fits")
    best, out = cheapest(choices, bound=bound), Path(config.out)
    draw_frontier(choices, bound=bound, cost=cost).savefig(
        out / "budget.png", dpi=110, format="png"
    )
    content = {"bound": bound, "cost": cost, "cheapest": best and best.name}
    content |= {"choices": [one._asdict() for one in choices]}
    (out / "budget.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{cost}\n\n{_table(choices, bound=bound)}\n\n{_advice(choices, best, bound=bound)}")
    print(f"{out / 'budget.png'}, {out / 'budget.json'}")
    return 0 if best is not None else 3


def _platform(topology: str) -> str:
    kind = topology.partition(":")[0]
    if kind == "cpu":
        raise ConfigError(
            f"--topology {topology}: simulated devices have no rates; name chips, such as "
            "v5p:1x1x1 or h100:1, or leave it out, and steps are timed here"
        )
    return "gpu" if kind in GPUS else "tpu"


def _with_candidates(config: DoctorConfig, platform: str, *, devices: int) -> DoctorConfig:
    if "precisions" in config.model_fields_set:
        return config
    kinds = _BLOCKS[config.sampler.name] if not config.sampler.url else ()  # a server's are its own
    if config.sampler.name == "vllm" and config.sampler.device != "cpu":
        kinds = ()
    if not Checkpoint(config.model.path).config.dense:
        kinds = tuple(kind for kind in kinds if kind != "int8")
    # Elsewhere than on a CPU nothing shows that fixed sums are equal.
    fixed = (platform, devices, config.sampler.name) == ("cpu", 1, "embedded")
    names = candidates(platform, devices=devices, blocks=kinds, fixed_sums=fixed)
    return config.model_copy(update={"precisions": tuple(names)})


def _table(choices: Sequence[Choice], *, bound: float) -> str:
    line = frontier(choices)
    lines = [["precision", "", "step", "x bf16_master", "beta std"]]
    base = next((one.cost for one in choices if one.name == "bf16_master"), None)
    for one in sorted(choices, key=lambda one: one.cost):
        marks = ["frontier"] if one in line else []
        marks += ["under"] if one.beta <= bound else []
        times = f"{one.cost / base:.2f}" if base else "-"
        lines.append([one.name, ", ".join(marks), time_text(one.cost), times, f"{one.beta:.1e}"])
    return columns(lines, left=2)


def _advice(choices: Sequence[Choice], best: Choice | None, *, bound: float) -> str:
    if best is None:
        least = min(choices, key=lambda one: (isnan(one.beta), one.beta))
        return (
            f"No beta stays under {bound:g} nats. {least.name} has the smallest, {least.beta:.1e}: "
            "raise the bound, or set loss.ratio = 'shadowed' or 'on_policy'."
        )
    return (
        f"Use precision = {best.name!r}: the cheapest under {bound:g} nats, with {best.beta:.1e} "
        f"at {time_text(best.cost)} a step."
    )
