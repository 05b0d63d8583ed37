"""The write-up's other explanations of the stall, measured: beta that distorts the weights of the
gradients, and updates too small to move the published words."""

from collections.abc import Mapping
from pathlib import Path

from experiments.runs import markdown, spread
from reproduce import phantom
from reproduce.grid import Entries, curve, early

CLEAN = "beta removed: ratio over the anchor, clipped"
COMPARED = {"fp8": [phantom.FAILURE, "r = 1"], "embedded": [phantom.FAILURE, CLEAN]}
CHANGED, KEPT_BACK = "words changed", "norm at the others"
_STEPS = {"train.steps": "10", "probe.every": "1"}


def compared(directory: Path, *, seed: int) -> dict[tuple[str, str], Entries]:
    """Trains or reads ten rollouts of the compared rows of each sampler."""
    return {
        (sampler, row): phantom.run_row(
            directory,
            row,
            run_dir=phantom.row_dir(directory / f"explained-{sampler}", row, seed=seed),
            seed=seed,
            more=_STEPS | (phantom.COARSE if sampler == "fp8" else {}),
        )
        for sampler, rows in COMPARED.items()
        for row in rows
    }


def table(results: Mapping[tuple[str, str], Entries]) -> str:
    """Formats a line for each run: means over ten rollouts, and the first one's."""
    columns = {
        "correlation of the weights": "probe/weight_correlation",
        "difference of the weights": "probe/weight_difference",
        "phantom": "probe/phantom",
        CHANGED: "publish/changed",
        KEPT_BACK: "publish/absorbed",
    }
    rows = []
    for (sampler, row), entries in results.items():
        found = {k: f"{early([entries], name)[0]:.3f}" for k, name in columns.items()}
        with_advantage = curve([entries], "probe/beta_advantage")[0]
        first = {f"{k}, first": f"{entries[0][columns[k]]:.3f}" for k in (CHANGED, KEPT_BACK)}
        found["beta with the advantage"] = spread(with_advantage, "{:+.3f}")
        rows.append({"sampler": sampler, "row": row} | found | first)
    return markdown(rows)
