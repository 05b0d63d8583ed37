"""The plot of a run: its main curves in one PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Title and metric of each panel.
PANELS = (
    ("reward", "reward"),
    ("held-out accuracy", "eval/accuracy"),
    ("KL to the reference (sampler where there is none)", "kl"),
    ("gradient norm", "grad_norm"),
    ("completion length, tokens", "completion_length"),
)


def draw_run(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws reward, accuracy, KL, gradient norm and completion length over the steps.

    The entries are those of `tracking.read_metrics`; a metric never logged leaves its panel empty.
    """
    import matplotlib.figure  # half a second to import, and drawn at the end of a run

    figure = matplotlib.figure.Figure(figsize=(15, 7), layout="constrained")
    axes = list(figure.subplots(2, 3).flat)
    for axis, (title, name) in zip(axes, PANELS, strict=False):
        points = [(e["step"], e[name]) for e in entries if e.get(name) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            # Markers for a metric with few points, such as held-out accuracy.
            axis.plot(steps, values, marker="o" if len(points) < 30 else "", linewidth=1.2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for axis in axes[len(PANELS) :]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
