"""Plots of the two results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np
from reproduce.grid import SMOOTHED, Entries, curve, smooth

COLORS = ("#c1272d", "#555555", "#0a7a5c", "#1f5fbf", "#e08214", "#8e44ad", "#17a2b8", "#a0522d",
          "#e377c2", "#7f7f00")  # fmt: skip
STYLES = ("-", "--", ":")


def new(columns: int, *, width: float = 5.2, height: float = 4.0, rows: int = 1):
    """Creates a figure and its axes, in reading order."""
    figure = matplotlib.figure.Figure((columns * width, rows * height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axis in axes:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save(figure: matplotlib.figure.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def phantom_lengths(
    path: Path, results: Mapping[str, Mapping[str, Sequence[Entries]]], *, rows: Sequence[str]
) -> None:
    """Plots completion length by rollout: {sampler: {row: runs}}, a panel for each sampler, a color
    for each row, the mean over seeds with a band from minimum to maximum."""
    figure, axes = new(len(results), width=6.0, height=4.6)
    for axis, (sampler, found) in zip(axes, results.items(), strict=True):
        for i, row in enumerate(rows):
            if row not in found:
                continue
            values = -curve(found[row], "reward")
            steps = np.arange(1, values.shape[1] + 1)
            width, color = 2.2 if i == 0 else 1.3, COLORS[i % len(COLORS)]
            label = f"{row} ({len(values)})"
            axis.plot(steps, values.mean(axis=0), color=color, label=label, linewidth=width)
            low, high = values.min(axis=0), values.max(axis=0)
            axis.fill_between(steps, low, high, color=color, alpha=0.07, linewidth=0)
        axis.set_title(f"reward = -length, sampler: {sampler}")
        axis.set_ylabel("mean length of the answers, characters")
        axis.set_xlabel("rollout")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, framealpha=0.9, title="row (seeds)", title_fontsize=8)
    save(figure, path)


def phantom_betas(path: Path, results: Mapping[str, Mapping[str, Sequence[Entries]]]) -> None:
    """Plots |beta| by the sampler's probability, and the share clipped before any update with the
    dtype's phantoms in a darker color: {sampler: {precision: runs}}."""
    figure, axes = new(2)
    position = 0
    for i, (sampler, precisions) in enumerate(results.items()):
        for color, (precision, runs) in zip(COLORS, precisions.items(), strict=False):
            first = [run[:10] for run in runs]
            means = [np.nanmean(curve(first, f"probe/beta_decile_{d}")) for d in range(10)]
            label = f"{precision}, {sampler}"
            style = {"color": color, "linestyle": STYLES[i]}
            if any(means):  # a matched precision has no beta
                axes[0].plot(range(1, 11), means, marker="o", markersize=3.5, label=label, **style)
            clipped = 100 * np.nanmean(curve(first, "probe/clipped"))
            phantom = 100 * np.nanmean(curve(first, "probe/phantom"))
            axes[1].barh(position, clipped, color=color, alpha=0.45, height=0.55)
            axes[1].barh(position, phantom, color=color, height=0.55)
            text = f" {clipped:.1f} %, by the dtype {phantom:.1f} %"
            axes[1].text(clipped, position, text, va="center", fontsize=9)
            axes[1].text(0, position + 0.31, label, va="bottom", fontsize=8.5)
            position -= 1
    axes[0].set_xlabel("tenth of the tokens by the sampler's probability, rarest first")
    axes[0].set_ylabel("mean |beta|, nats")
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    axes[1].set_yticks([])
    axes[1].set_xlabel("tokens clipped at eps .2 before any update, rollouts 1 to 10, %")
    axes[1].margins(x=0.6, y=0.1)
    save(figure, path)


def offline(path: Path, scores: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Plots learner against sampler probabilities and the sequence log-ratio by length, a row of
    panels for each model: {model: scores of offline.measured}."""
    figure, axes = new(3, rows=len(scores), width=4.6, height=4.2)
    for i, (model, found) in enumerate(scores.items()):
        served = [(d, color) for d, color in _DTYPES.items() if f"vllm {d}" in found]
        for axis, (dtype, color) in zip(axes[3 * i :], served, strict=False):
            p, q = (np.exp(found[f"{who} {dtype}"]).ravel() for who in ("learner", "vllm"))
            axis.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
            axis.plot(q, p, ".", color=color, markersize=2.5, alpha=0.35, rasterized=True)
            axis.set(xlabel=f"probability, vLLM in {dtype}", xlim=(0, 1), ylim=(0, 1))
            axis.set_ylabel(f"probability, JAX in {dtype}")
            axis.set_title(f"{model}: {dtype}")
            lengths = np.arange(1, p.size // len(found[f"vllm {dtype}"]) + 1)
            delta = found[f"learner {dtype}"] - found[f"vllm {dtype}"]
            std = np.cumsum(delta, axis=1).std(axis=0)
            axes[3 * i + 2].plot(lengths, std, color=color, label=dtype, linewidth=1.8)
        last = axes[3 * i + 2]
        last.set(xscale="log", yscale="log", xlabel="tokens of the sequence")
        last.set_ylabel("std of the sequence's log-ratio, nats")
        last.set_title(f"{model}: mismatch by length")
        last.legend()
    save(figure, path)


def sanity(path: Path, results: Mapping[str, Mapping[str, Sequence[Entries]]]) -> None:
    """Plots training accuracy of each algorithm by precision, and the mismatch before an update:
    {algorithm: {precision: runs}}."""
    panels = len(results) + 1
    figure, axes = new(min(panels, 3), rows=-(-panels // 3), width=4.6, height=3.5)
    for axis, (algorithm, precisions) in zip(axes, results.items(), strict=False):
        for precision, runs in precisions.items():
            smoothed = 100 * smooth(curve(runs, "reward"))
            steps = np.arange(SMOOTHED, SMOOTHED + smoothed.shape[1])
            color = _DTYPES[precision]
            axis.plot(steps, smoothed.mean(0), label=precision, color=color, linewidth=1.6)
            axis.fill_between(steps, smoothed.min(0), smoothed.max(0), color=color, alpha=0.12)
        axis.set(title=algorithm, xlabel="rollout", ylabel="training accuracy, %", ylim=(0, 101))
        axis.legend(loc="lower right")
    last = axes[len(results)]
    for precision, color in _DTYPES.items():
        shown = [found[precision] for found in results.values() if precision in found]
        for i, runs in enumerate(shown):
            values = curve(runs, "probe/sequence_std").mean(axis=0)
            steps = np.flatnonzero(~np.isnan(values))
            label = precision if i == 0 else None
            last.plot(steps + 1, values[steps], ".-", color=color, linewidth=1, label=label)
    last.set(title="learner against sampler, all algorithms", xlabel="rollout", yscale="log")
    last.set_ylabel("std of the sequence log-ratio, nats")
    last.legend()
    for axis in axes[panels:]:
        axis.set_visible(False)
    save(figure, path)


_DTYPES = {"bf16": "#c1272d", "fp16": "#1f5fbf", "f32": "#555555"}
