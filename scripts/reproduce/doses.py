"""The share of clipped tokens that a stall needs: a narrower clip makes beta clip more of them, and
the same clip with a sampler in f32 shows what the clip does by itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from experiments.runs import markdown, spread
from reproduce import phantom
from reproduce.grid import Entries, curve, early

CLIPS = (0.2, 0.05, 0.0125, 0.003)
PRECISIONS = {"bf16": "phantom", "f32": "fp32"}  # by the sampler's dtype


def compared(directory: Path, *, seeds: Sequence[int]) -> dict[tuple[float, str], list[Entries]]:
    """Trains or reads the runs of each clip and each dtype of the embedded sampler."""
    return {
        (clip, dtype): [
            phantom.run_row(
                directory,
                phantom.FAILURE,
                run_dir=directory / "doses" / f"{dtype}-{clip:g}-{seed}",
                seed=seed,
                more={
                    "precision": precision,
                    "loss.clip_low": clip,
                    "loss.clip_high": clip,
                    "probe.clip_range": f"{clip},{clip}",
                },
            )
            for seed in seeds
        ]
        for clip in CLIPS
        for dtype, precision in PRECISIONS.items()
    }


def table(results: Mapping[tuple[float, str], Sequence[Entries]]) -> str:
    """Formats a line for each clip and dtype, over their seeds."""
    rows = []
    for (clip, dtype), runs in results.items():
        lengths = -curve(runs, "reward")
        course = lengths.mean(axis=0)
        reached = sorted(phantom.steps_to_near(run) for run in runs)
        clipped = sum(early(runs, name) for name in ("clip/low", "clip/high"))
        rows.append(
            {
                "clip": f"{clip:g}",
                "sampler": dtype,
                "before an update, 1-10": spread(early(runs, "probe/clipped")),
                "clipped, 1-10": spread(clipped),
                "length at rollout 1, 10, 20, 30": ", ".join(
                    f"{course[i]:.1f}" for i in (0, 9, 19, 29)
                ),
                "of the last 5": spread(lengths[:, -5:].mean(axis=1), "{:.1f}"),
                "rollouts to within 10 %": ", ".join(
                    "never" if np.isinf(near) else f"{near:.0f}" for near in reached
                ),
            }
        )
    return markdown(rows)
