"""Plots of the disagreement between learner and sampler."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.figure
import numpy as np

from jaxrl.diagnostics.ratio.agreement import LogprobPairs, prefix_sums

_MOST_POINTS = 4000  # more would hide each other
_SMALLEST = 1e-8  # nats; smaller values are drawn here
_RAREST = 1e-6  # lowest probability on the axes


def draw_agreement(
    pairs: Mapping[str, LogprobPairs], path: Path, *, title: str, low: float, high: float
) -> None:
    """Draws one PNG.

    The upper row has a panel for each policy with every token's probability by learner and sampler.
    The lower row shows how a sequence's log-ratio grows with its length, and beta by the token's
    probability. PPO clips ratios below 1 - low and above 1 + high.
    """
    columns = max(2, len(pairs))
    figure = matplotlib.figure.Figure(figsize=(3.4 * columns, 7.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.05), squeeze=False)[:, 0]
    panels = upper.subplots(1, columns, sharex=True, sharey=True, squeeze=False)[0]
    for i, (panel, (name, logprobs)) in enumerate(zip(panels, pairs.items(), strict=False)):
        _scatter(panel, logprobs, name=name, color=f"C{i}", low=low, high=high)
    panels[0].set_ylabel("probability by the learner")
    for panel in panels[len(pairs) :]:
        panel.set_visible(False)
    panels[0].legend(loc="upper left", fontsize=8, frameon=False)
    left, right = lower.subplots(1, 2)
    for i, (name, logprobs) in enumerate(pairs.items()):
        _spread(left, logprobs, name=name, color=f"C{i}")
        _deciles(right, logprobs, name=name, color=f"C{i}")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:g}")
    left.set(xlabel="tokens summed (points: whole completions)", title="growth with length")
    left.set(ylabel="|log-ratio of the sequence|, nats")
    right.set(ylabel="mean |beta|, nats", title="by the token's probability")
    right.set(xlabel="decile of the sampler's probability (1: rarest tokens)", xticks=range(1, 11))
    right.axhline(np.log1p(high), color="0.4", linewidth=0.8, linestyle=":", label="clip")
    for panel in (left, right):
        panel.set(yscale="log", ylim=(_SMALLEST, None))
        panel.grid(alpha=0.3, which="major")
        panel.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def _scatter(panel, pairs: LogprobPairs, *, name: str, color: str, low: float, high: float) -> None:
    chosen = np.linspace(0, len(pairs.learner) - 1, min(_MOST_POINTS, len(pairs.learner)))
    learner, sampler = (np.exp(x[chosen.astype(int)]) for x in (pairs.learner, pairs.sampler))
    rarest = np.clip(min(sampler.min(), learner.min()), _RAREST, 0.05)
    line = 10.0 ** np.array([np.floor(np.log10(rarest)), 0.0])
    panel.plot(line, line, color="0.3", linewidth=0.8, label="equal")
    panel.fill_between(line, line * (1 - low), line * (1 + high), color="0.85", label="not clipped")
    panel.scatter(sampler, learner, s=5, alpha=0.5, color=color, linewidths=0, rasterized=True)
    panel.set(xscale="log", yscale="log", xlabel="probability by the sampler")
    panel.set(xlim=line * (1, 1.3), ylim=line * (1, 1.3), box_aspect=1)
    panel.set_title(f"{name}: beta std {(pairs.learner - pairs.sampler).std():.1e}", fontsize=9)


def _spread(panel, pairs: LogprobPairs, *, name: str, color: str) -> None:
    beta = pairs.learner - pairs.sampler
    sums = prefix_sums(beta, pairs.sequences)
    lengths = [length for length, _ in sums]
    spreads = _shown(np.array([s.std() for _, s in sums]))
    panel.plot(lengths, spreads, marker="o", markersize=4, color=color, label=f"{name}, std")
    whole = _shown(np.abs(np.bincount(pairs.sequences, weights=beta)))
    panel.scatter(np.bincount(pairs.sequences), whole, s=6, alpha=0.35, color=color, linewidths=0)


def _deciles(panel, pairs: LogprobPairs, *, name: str, color: str) -> None:
    beta = np.abs(pairs.learner - pairs.sampler)
    parts = np.array_split(beta[np.argsort(pairs.sampler, kind="stable")], 10)
    means = _shown(np.array([p.mean() for p in parts if p.size]))
    panel.plot(range(1, 1 + len(means)), means, marker="o", markersize=4, color=color, label=name)


def _shown(values: np.ndarray) -> np.ndarray:
    """Returns values for a logarithmic axis, with 0 at its lower edge."""
    return np.maximum(values, _SMALLEST)
