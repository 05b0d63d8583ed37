"""Plots of the disagreement between learner and sampler."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from jaxrl.diagnostics.ratio.agreement import prefix_sums
from jaxrl.diagnostics.ratio.split import LogRatio
from jaxrl.losses.algebra import Clip

_MOST_POINTS = 4000  # more would hide each other
_SMALLEST = 1e-8  # nats; smaller values are drawn here
_RAREST = 1e-6  # lowest probability on the axes


def draw(ratios: Mapping[str, LogRatio], *, title: str, clip: Clip) -> Figure:
    """Draws named sets of log-ratios as a figure, which a notebook shows and `savefig` writes.

    The upper row has a panel for each name with every token's probability by learner and sampler.
    The lower row shows how a sequence's log-ratio grows with its length, and the mean |alpha| and
    |beta| by the token's probability. The clip is drawn where its unit is: at tokens, or at whole
    sequences; the mean over a sequence has no axis here.
    """
    columns = max(2, len(ratios))
    figure = Figure(figsize=(3.4 * columns, 7.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.05), squeeze=False)[:, 0]
    panels = upper.subplots(1, columns, sharex=True, sharey=True, squeeze=False)[0]
    for i, (panel, (name, ratio)) in enumerate(zip(panels, ratios.items(), strict=False)):
        _scatter(panel, ratio, name=name, color=f"C{i}", clip=clip)
    panels[0].set_ylabel("probability by the learner")
    for panel in panels[len(ratios) :]:
        panel.set_visible(False)
    panels[0].legend(loc="upper left", fontsize=8, frameon=False)
    left, right = lower.subplots(1, 2)
    for i, (name, ratio) in enumerate(ratios.items()):
        _spread(left, ratio, name=name, color=f"C{i}")
        _deciles(right, ratio, name=name, color=f"C{i}")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:g}")
    left.set(xlabel="tokens summed (points: whole completions)", title="growth with length")
    left.set(ylabel="|log-ratio of the sequence|, nats")
    right.set(ylabel="nats", title="by the token's probability")
    right.set(xlabel="tenths of the tokens, rarest first", xticks=range(1, 11))
    if clip.unit != "mean":
        edge = right if clip.unit == "token" else left
        edge.axhline(np.log1p(clip.high), color="0.4", linewidth=0.8, linestyle=":", label="clip")
    for panel in (left, right):
        panel.set(yscale="log", ylim=(_SMALLEST, None))
        panel.grid(alpha=0.3, which="major")
        panel.legend(fontsize=8, frameon=False)
    return figure


def _scatter(panel, ratio: LogRatio, *, name: str, color: str, clip: Clip) -> None:
    chosen = np.linspace(0, len(ratio.learner) - 1, min(_MOST_POINTS, len(ratio.learner)))
    learner, sampler = (np.exp(x[chosen.astype(int)]) for x in (ratio.learner, ratio.sampler))
    rarest = np.clip(min(sampler.min(), learner.min()), _RAREST, 0.05)
    line = 10.0 ** np.array([np.floor(np.log10(rarest)), 0.0])
    panel.plot(line, line, color="0.3", linewidth=0.8, label="equal")
    if clip.unit == "token":
        band = line * (1 - clip.low), line * (1 + clip.high)
        panel.fill_between(line, *band, color="0.85", label="not clipped")
    panel.scatter(sampler, learner, s=5, alpha=0.5, color=color, linewidths=0, rasterized=True)
    panel.set(xscale="log", yscale="log", xlabel="probability by the sampler")
    panel.set(xlim=line * (1, 1.3), ylim=line * (1, 1.3), box_aspect=1)
    moved = f"alpha std {ratio.alpha.std():.1e}, " if ratio.alpha.any() else ""
    panel.set_title(f"{name}\n{moved}beta std {ratio.beta.std():.1e}", fontsize=9)


def _spread(panel, ratio: LogRatio, *, name: str, color: str) -> None:
    whole_ratio = ratio.learner - ratio.sampler
    sums = prefix_sums(whole_ratio, ratio.sequences)
    lengths = [length for length, _ in sums]
    spreads = _shown(np.array([s.std() for _, s in sums]))
    panel.plot(lengths, spreads, marker="o", markersize=4, color=color, label=f"{name}, std")
    whole = _shown(np.abs(np.bincount(ratio.sequences, weights=whole_ratio)))
    panel.scatter(np.bincount(ratio.sequences), whole, s=6, alpha=0.35, color=color, linewidths=0)


def _deciles(panel, ratio: LogRatio, *, name: str, color: str) -> None:
    rare_first = np.argsort(ratio.sampler, kind="stable")
    for part, values, style in (("beta", ratio.beta, "-o"), ("alpha", ratio.alpha, ":.")):
        if part == "beta" or values.any():
            parts = np.array_split(np.abs(values)[rare_first], 10)
            means = _shown(np.array([p.mean() for p in parts if p.size]))
            places, label = range(1, 1 + len(means)), f"{name}, mean |{part}|"
            panel.plot(places, means, style, markersize=4, color=color, label=label)


def _shown(values: np.ndarray) -> np.ndarray:
    """Returns values for a logarithmic axis, with 0 at its lower edge."""
    return np.maximum(values, _SMALLEST)
