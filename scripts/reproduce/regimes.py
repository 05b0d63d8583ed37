"""Regimes in which beta might stall a run: narrower clips, of which beta takes more tokens, and a
deeper and sharper model, also in a longer run of more and smaller updates. Each has a twin whose
sampler is in f32, so without beta."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from experiments.runs import markdown, spread
from reproduce import phantom
from reproduce.families import material_name
from reproduce.grid import Entries, curve, early

Keys = Mapping[str, object]
PRECISIONS = {"bf16": "phantom", "f32": "fp32"}  # by the sampler's dtype
DOSES: Mapping[str, Keys] = {
    f"{clip:g}": {
        "loss.clip_low": clip,
        "loss.clip_high": clip,
        "probe.clip_range": f"{clip},{clip}",
    }
    for clip in (0.2, 0.05, 0.0125, 0.003)
}
SHARP = phantom.DEEP | {"num_hidden_layers": 32, "initializer_range": 1.0}
SHARP_CASES: Mapping[str, Keys] = {
    "32 layers": {},
    # Four times the updates per rollout at a quarter of the learning rate, for twice as long.
    "32 layers, 480 updates": {
        "train.updates_per_rollout": 8,
        "train.steps": 60,
        "optimizer.learning_rate": 2.5e-4,
    },
}


def compared(
    directory: Path, *, material: Path, cases: Mapping[str, Keys], seeds: Sequence[int]
) -> dict[tuple[str, str], list[Entries]]:
    """Trains or reads the runs of each case and each dtype of the embedded sampler.

    Args:
      directory: of the runs.
      material: directory with a model for each seed, and prompts.
      cases: config keys by the case's name.
      seeds: of the runs and the models.
    """
    return {
        (case, dtype): [
            phantom.run_row(
                material,
                phantom.FAILURE,
                run_dir=directory / f"{dtype}-{material_name(case)}-{seed}",
                seed=seed,
                more={"precision": precision, **keys},
            )
            for seed in seeds
        ]
        for case, keys in cases.items()
        for dtype, precision in PRECISIONS.items()
    }


def table(name: str, results: Mapping[tuple[str, str], Sequence[Entries]]) -> str:
    """Formats a line for each case and dtype, over their seeds; `name` heads the cases."""
    rows = []
    for (case, dtype), runs in results.items():
        lengths = -curve(runs, "reward")
        course, last = lengths.mean(axis=0), lengths.shape[1]
        reached = sorted(phantom.steps_to_near(run) for run in runs)
        clipped = sum(early(runs, side) for side in ("clip/low", "clip/high"))
        rows.append(
            {
                name: case,
                "sampler": dtype,
                "beta std, 1-10": spread(early(runs, "probe/beta_std"), "{:.2f}"),
                "before an update, 1-10": spread(early(runs, "probe/clipped")),
                "clipped, 1-10": spread(clipped),
                "length at the first rollout, after a third, two thirds, all": ", ".join(
                    f"{course[i]:.1f}" for i in (0, last // 3 - 1, 2 * last // 3 - 1, -1)
                ),
                "of the last 5": spread(lengths[:, -5:].mean(axis=1), "{:.1f}"),
                "rollouts to within 10 %": ", ".join(
                    "never" if np.isinf(near) else f"{near:.0f}" for near in reached
                ),
            }
        )
    return markdown(rows)
