"""Measures how the costs of learning and sampling grow, and draws a panel for each.

    python scripts/bench_growth.py runs/growth.jsonl --picture docs/pictures/growth.png

Takes a quarter of an hour, with nothing else on the machine. The points of a panel are timed
alternately, three times each. The model has shape S. The learner computes in f32, on minibatches of
4,096 tokens or of two groups of completions of 64 tokens.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure
import numpy as np
from benchmarks import learning, sampling
from benchmarks.learning import Groups
from benchmarks.shapes import ANSWER, SHAPES
from benchmarks.timing import Run, alternate, summary, write
from experiments.runs import plain_parser

from jaxrl.core import PRESETS
from jaxrl.models import DecoderConfig

TOKENS, COMPLETION = 4096, 64
LAYERS, VOCABULARIES = (2, 4, 8, 16), (1024, 4096, 16384, 65536)
LENGTHS, GROUPS = (128, 256, 512, 1024, 2048), (1, 2, 4, 8, 16)
PROMPTS, IN_FLIGHT = (64, 128, 256, 512, 1024), (8, 16, 32, 64, 128, 256)


class Point(NamedTuple):
    """A run at `x` that does `units` units of work."""

    x: int
    run: Run
    units: int


class Panel(NamedTuple):
    """A panel: its title, the label of its x axis, the unit of work, and lines by name."""

    title: str
    axis: str
    unit: str
    lines: Mapping[str, list[Point]]


def step(config: DecoderConfig, work: Groups, *, shared: bool = False) -> Run:
    """Compiles a learner's step."""
    return learning.learner_step(
        dataclasses.replace(config, max_positions=2 * TOKENS),
        precision=PRESETS["fp32"],
        remat="matmuls",
        work=work,
        microbatch=TOKENS // 2,
        shared=shared,
    ).run


def panels() -> Iterator[Panel]:
    """Builds the panels, one after another: their programs take memory."""
    small = SHAPES["S"]
    alone = Groups(TOKENS // 256, 1, 64, 192)
    deep = [dataclasses.replace(small, num_layers=n) for n in LAYERS]
    layers = [Point(c.num_layers, step(c, alone), TOKENS) for c in deep]
    yield Panel("learner: layers", "layers", "token", {"": layers})
    wide = [dataclasses.replace(small, vocab_size=n) for n in VOCABULARIES]
    vocabularies = [Point(c.vocab_size, step(c, alone), TOKENS) for c in wide]
    yield Panel("learner: vocabulary", "tokens of the vocabulary", "token", {"": vocabularies})
    cut = [(n, Groups(TOKENS // n, 1, n // 4, 3 * n // 4)) for n in LENGTHS]
    lengths = [Point(n, step(small, work), TOKENS) for n, work in cut]
    yield Panel("learner: length", "tokens of a sequence", "token", {"": lengths})
    sizes = [(n, Groups(2, n, 512, COMPLETION)) for n in GROUPS]
    yield _both("learner: group, prompts of 512 tokens", "completions of a prompt", sizes)
    prompts = [(n, Groups(2, 8, n, COMPLETION)) for n in PROMPTS]
    yield _both("learner: prompt, groups of 8", "tokens of a prompt", prompts)
    lines = {}
    for dtype in ("f32", "bf16"):
        lines[dtype] = [Point(n, _completions(n, dtype=dtype), n * ANSWER) for n in IN_FLIGHT]
    yield Panel("sampler", "completions in flight", "token", lines)


def _both(title: str, axis: str, works: list[tuple[int, Groups]]) -> Panel:
    lines = {}
    for name, shared in {"each its own prompt": False, "one prompt for all": True}.items():
        lines[name] = [
            Point(x, step(SHAPES["S"], work, shared=shared), work.count * work.size)
            for x, work in works
        ]
    return Panel(title, axis, "completion", lines)


def _completions(count: int, *, dtype: str) -> Run:
    limits = sampling.equal(count)
    return sampling.embedded(SHAPES["S"], dtype=dtype, limits=limits, in_flight=count)


def draw(axis, panel: Panel, seconds: Mapping[tuple[str, int], list[float]]) -> None:
    """Draws the medians of a panel with their ranges, in ms for a unit of work."""
    for color, (name, points) in zip(("#1f5fbf", "#c1272d"), panel.lines.items(), strict=False):
        xs = [p.x for p in points]  # the same on all lines
        costs = np.array([[1e3 * s / p.units for s in seconds[name, p.x]] for p in points])
        middle = np.median(costs, axis=1)
        spread = np.abs([costs.min(axis=1), costs.max(axis=1)] - middle)
        axis.errorbar(xs, middle, spread, color=color, marker="o", capsize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [f"{x:,}" for x in xs])
    axis.set(title=panel.title, xlabel=panel.axis, ylabel=f"ms per {panel.unit}")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    if len(panel.lines) > 1:
        axis.legend(fontsize=8)


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("out", type=Path, help="file of the results, JSON lines")
    parser.add_argument("--picture", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure = matplotlib.figure.Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for axis, panel in zip(axes, panels(), strict=True):
        runs = {(name, p.x): p.run for name, points in panel.lines.items() for p in points}
        seconds = alternate(runs, repetitions=3)
        for name, points in panel.lines.items():
            for p in points:
                rates = [p.units / s for s in seconds[name, p.x]]
                row = {"panel": panel.title, "line": name, panel.axis: p.x, "unit": panel.unit}
                write(row | {"units/s": summary(rates)}, args.out)
        draw(axis, panel, seconds)
    figure.savefig(args.picture, dpi=90)


if __name__ == "__main__":
    main()
