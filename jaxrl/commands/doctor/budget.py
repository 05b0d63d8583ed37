"""The frontier of `jaxrl doctor --budget`: the cheapest dtype policy whose beta stays under it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxrl.commands.doctor.measure import examine
from jaxrl.commands.doctor.text import columns
from jaxrl.config.doctor import DoctorConfig
from jaxrl.diagnostics import Choice, candidates, cheapest, draw_frontier, frontier

_COST = "seconds of a training step on this device, after compilation"


def spend(config: DoctorConfig, *, bound: float, note: Callable[[str], None]) -> int:
    """Measures beta and a step of each candidate, prints the frontier, and writes budget.json and
    budget.png. Candidates are the config's precisions, if it names any. The exit status is 3 if no
    beta stays under the bound, in nats.

    Raises:
      ValueError, ServerFailedError, RefusedError: as `examine`.
    """
    changes: dict[str, object] = {"timed_steps": max(2, config.timed_steps)}
    if "precisions" not in config.model_fields_set:
        size = config.mesh.batch_shards()
        texts = candidates(jax.default_backend(), devices=size)
        changes["precisions"] = tuple(texts)
    measured = examine(config.model_copy(update=changes), note=note)
    choices = [
        Choice(m.precision, m.numbers["beta_std"], m.numbers["seconds_per_step"]) for m in measured
    ]
    best, out = cheapest(choices, bound=bound), Path(config.out)
    draw_frontier(choices, bound=bound, cost=_COST).savefig(
        out / "budget.png", dpi=110, format="png"
    )
    content = {"bound": bound, "cheapest": best and best.name}
    content |= {"choices": [one._asdict() for one in choices]}
    (out / "budget.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{_table(choices, bound=bound)}\n\n{_advice(choices, best, bound=bound)}")
    print(f"{out / 'budget.png'}, {out / 'budget.json'}")
    return 0 if best is not None else 3


def _table(choices: Sequence[Choice], *, bound: float) -> str:
    line = frontier(choices)
    lines = [["precision", "", "step", "beta std"]]
    for one in sorted(choices, key=lambda one: one.cost):
        marks = ["frontier"] if one in line else []
        marks += ["under"] if one.beta <= bound else []
        lines.append([one.name, ", ".join(marks), f"{one.cost:.3f} s", f"{one.beta:.1e}"])
    return columns(lines, left=2)


def _advice(choices: Sequence[Choice], best: Choice | None, *, bound: float) -> str:
    if best is None:
        least = min(choices, key=lambda one: one.beta)
        return (
            f"No beta stays under {bound:g} nats. {least.name} has the smallest, {least.beta:.1e}: "
            "raise the bound, or set loss.ratio = 'shadowed' or 'on_policy'."
        )
    return (
        f"Use precision = {best.name!r}: the cheapest under {bound:g} nats, with {best.beta:.1e} "
        f"at {best.cost:.3f} s a step."
    )
