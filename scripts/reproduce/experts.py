"""The sanity test for a mixture of experts: the algorithms that the paper's figure has for one,
with accuracy on held-out prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.runs import accuracies, markdown, spread, trained
from reproduce import families, sanity
from reproduce.grid import finished_runs, read_rollouts

from jaxrl.tracking.tracker import read_metrics

CASE = "qwen3_moe, 2 of 8 experts"
EVALUATED = 10  # rollouts between two evaluations
ALGORITHMS: Mapping[str, Mapping[str, object]] = {
    "GRPO-Seq-MIS": {"loss.name": "grpo_seq_mis"},
    "GRPO-Token-TIS": {"loss.name": "grpo_token_tis"},
    "PG-Seq-TIS": {"loss.name": "pg_seq_is", "loss.high": 3},
}
Cell = tuple[str, str]  # algorithm, dtype of training and sampler
CELLS: list[Cell] = [(a, d) for a in ALGORITHMS for d in families.PRECISIONS]


def run_cell(directory: Path, cell: Cell, *, seed: int) -> None:
    """Trains one run, after its base model."""
    algorithm, dtype = cell
    material = families.material(directory, CASE)
    keys = families.keys(directory, CASE, dtype=dtype, seed=seed) | {
        "run_dir": material / f"{algorithm}-{dtype}-{seed}",
        "data.eval_path": material / "held_out.jsonl",
        "eval.every": EVALUATED,
    }
    trained(sanity.CONFIG, keys | dict(ALGORITHMS[algorithm]))


def found_cells(directory: Path) -> dict[Cell, list[Path]]:
    """Lists the directories of the finished runs, sorted by seed."""
    name = families.material_name(CASE)
    return finished_runs(directory, {(a, d): f"{name}/{a}-{d}-[0-9]*" for a, d in CELLS})


def table(results: Mapping[Cell, Sequence[Path]]) -> str:
    """Formats a line for each cell, over its seeds."""
    rows = []
    for (algorithm, dtype), run_dirs in results.items():
        held_out = [accuracies(read_metrics(d / "metrics.jsonl")) for d in run_dirs]
        rows.append(
            {"algorithm": algorithm, "training and sampler": dtype}
            | {
                f"held out, rollout {step}": spread([100 * run[step] for run in held_out], "{:.1f}")
                for step in held_out[0]
            }
            | sanity.columns([read_rollouts(d) for d in run_dirs])
        )
    return markdown(rows)
