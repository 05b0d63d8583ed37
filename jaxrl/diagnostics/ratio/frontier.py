"""The frontier of dtype policies: the smallest beta that each cost buys."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from jaxrl.core.precision import (
    PRESETS,
    PRODUCTS,
    Precision,
    check_products,
    disagreement,
    short_name,
)

_STEPS = ("activations", "logits", "wire", "sampler")  # roles that are changed one at a time
_WAYS = ("bf16x6", "bf16x3", "tf32x3", "tf32")  # of products of f32 operands


class Choice(NamedTuple):
    """A dtype policy with what it costs and how far its learner is from its sampler."""

    name: str  # its text
    beta: float  # standard deviation, in nats
    cost: float  # such as seconds of a step


def candidates(
    platform: str, *, devices: int = 1, blocks: Sequence[str] = (), fixed_sums: bool = False
) -> list[str]:
    """Lists dtype policies to compare on a platform: the presets, and each with one role changed to
    f32 or to its narrow dtype, with other products of f32 operands, with operands of 8 bits in a
    form of `blocks`, or with `fixed_sums`. The last two the sampler must have. Policies that the
    platform cannot compute and those that compute alike are left out."""
    found: dict[Precision, str] = {}
    for name, preset in PRESETS.items():
        narrow = short_name(preset.sampler)
        texts = [f"{name},{role}={dtype}" for role in _STEPS for dtype in ("f32", narrow)]
        others = (way for way in _WAYS if platform in PRODUCTS[way][1])  # a CPU only emulates them
        texts += [f"{name},products={way}" for way in others]
        texts += [f"{name},blocks={kind}" for kind in blocks]
        if fixed_sums and disagreement(preset) is None:
            texts.append(f"{name},sums=fixed")
        for text in (name, *texts):
            try:
                precision = Precision.parse(text)
                check_products(precision, platform, devices=devices)
            except ValueError:
                continue
            found.setdefault(precision, text)
    return list(found.values())


def frontier(choices: Sequence[Choice]) -> list[Choice]:
    """Selects the choices that no other one beats in cost and in beta, the cheapest first. Of equal
    ones the first counts. A beta that is NaN, of a policy that overflows, beats nothing."""
    kept: list[Choice] = []
    for choice in sorted(_known(choices), key=lambda one: (one.cost, one.beta)):
        if not kept or choice.beta < kept[-1].beta:
            kept.append(choice)
    return kept


def _known(choices: Sequence[Choice]) -> list[Choice]:
    return [choice for choice in choices if not math.isnan(choice.beta)]


def cheapest(choices: Sequence[Choice], *, bound: float) -> Choice | None:
    """Returns the cheapest choice whose beta is at most `bound`, of equal ones that with the
    smallest beta; None if there is none."""
    under = [choice for choice in choices if choice.beta <= bound]
    return min(under, key=lambda one: (one.cost, one.beta), default=None)


def draw_frontier(choices: Sequence[Choice], *, bound: float, cost: str) -> Figure:
    """Draws beta against cost, with the frontier and the bound. `cost` labels its axis; names stand
    below the choices of the frontier and above other presets."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    floor = min([c.beta for c in choices if c.beta > 0], default=bound) / 3  # 0 has no logarithm
    line = frontier(choices)
    panel.plot(
        [c.cost for c in line],
        [max(c.beta, floor) for c in line],
        drawstyle="steps-post",
        color="#1f5fbf",
        label="frontier",
    )
    panel.axhline(bound, color="0.4", linewidth=0.8, linestyle=":", label=f"bound, {bound:g}")
    for choice in _known(choices):
        place = choice.cost, max(choice.beta, floor)
        color, above = ("#1f5fbf", 4) if choice in line else ("0.6", 3)
        panel.scatter(*place, s=18, color=color, zorder=above)
        if choice in line or choice.name in PRESETS:
            panel.annotate(
                choice.name,
                place,
                fontsize=7,
                xytext=(5, -9 if choice in line else 5),
                textcoords="offset points",
            )
    panel.set(yscale="log", xlabel=cost, ylabel="standard deviation of beta, nats")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, frameon=False)
    return figure
