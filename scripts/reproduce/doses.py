"""The share of clipped tokens that a stall needs: a narrower clip makes beta clip more of them, and
the same clip with a sampler in f32 shows what the clip does by itself."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from experiments.runs import markdown
from reproduce import phantom
from reproduce.grid import Entries, curve, early

CLIPS = (0.2, 0.05, 0.0125)
PRECISIONS = {"bf16": "phantom", "f32": "fp32"}  # by the sampler's dtype


def compared(directory: Path, *, seed: int) -> dict[tuple[float, str], Entries]:
    """Trains or reads a run for each clip and each dtype of the embedded sampler."""
    return {
        (clip, dtype): phantom.run_row(
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
        for clip in CLIPS
        for dtype, precision in PRECISIONS.items()
    }


def table(results: Mapping[tuple[float, str], Entries]) -> str:
    """Formats a line for each run."""
    rows = []
    for (clip, dtype), entries in results.items():
        lengths = -curve([entries], "reward")[0]
        near = phantom.steps_to_near(entries)
        clipped = sum(early([entries], name)[0] for name in ("clip/low", "clip/high"))
        rows.append(
            {
                "clip": f"{clip:g}",
                "sampler": dtype,
                "before an update, 1-10": f"{early([entries], 'probe/clipped')[0]:.3f}",
                "clipped, 1-10": f"{clipped:.3f}",
                "length at rollout 1, 10, 20": ", ".join(f"{lengths[i]:.1f}" for i in (0, 9, 19)),
                "of the last 5": f"{lengths[-5:].mean():.1f}",
                "rollouts to within 10 %": "never" if np.isinf(near) else f"{near:.0f}",
            }
        )
    return markdown(rows)
