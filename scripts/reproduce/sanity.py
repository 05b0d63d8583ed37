"""The sanity test: algorithms in several precisions, on prompts that can all be learned."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import make_arithmetic
import numpy as np
from experiments.runs import CONFIGS, config, markdown, spread, trained
from reproduce import scoring
from reproduce.grid import Entries, curve, found, smooth
from reproduce.phantom import SHORT, SMALL

from jaxrl import cli
from jaxrl.training.run import open_run

CONFIG = CONFIGS / "sanity_test.toml"
ALGORITHMS = {
    "GRPO": "grpo",
    "GRPO-Token-TIS": "grpo_token_tis",
    "GRPO-Seq-MIS": "grpo_seq_mis",
    "GSPO": "gspo",
    "PG-Seq-IS": "pg_seq_is",
}
PRECISIONS = {"bf16": "bf16_master", "fp16": "fp16_master", "f32": "fp32"}
SAMPLERS = {"bf16": "bf16", "fp16": "f16", "f32": "f32"}
CANDIDATES = 200  # prompts to choose the perfectible ones from
Cell = tuple[str, str, str]  # algorithm, training dtype, sampler dtype
# Every algorithm with equal dtypes on both sides, and GRPO with others.
CELLS: list[Cell] = [(name, dtype, dtype) for name in ALGORITHMS for dtype in PRECISIONS]
CELLS += [("GRPO", a, b) for a in PRECISIONS for b in SAMPLERS if a != b]


def write_material(
    directory: Path, *, model: dict = make_arithmetic.MODEL, sft: Sequence[str] = ()
) -> None:
    """Writes perfectible prompts and, unless it is there, a base model: by default the
    quickstart's. `sft` has further arguments of its fine-tuning."""
    if not (directory / "base" / "model").exists():
        directory.mkdir(parents=True, exist_ok=True)
        make_arithmetic.write_model(directory / "untrained", model, seed=0)
        rng = random.Random(0)
        make_arithmetic.write_texts(directory, make_arithmetic.SIZES, rng=rng)
        _jaxrl(
            "sft",
            "configs/quickstart_sft.toml",
            f"--run_dir={directory / 'base'}",
            f"--model.path={directory / 'untrained'}",
            f"--data.path={directory / 'sft.jsonl'}",
            *sft,
        )
    out = directory / "perfectible.jsonl"
    if not out.exists():
        lines = (directory / "train.jsonl").read_text().splitlines()[:CANDIDATES]
        (directory / "candidates.jsonl").write_text("\n".join(lines) + "\n")
        _jaxrl(
            "eval",
            "configs/sanity_test.toml",
            "--samples=40",
            "--keep=0.2:0.8",
            f"--out={out}",
            "--precision=fp32",
            f"--model.path={directory / 'base' / 'model'}",
            f"--data.path={directory / 'candidates.jsonl'}",
        )


def _jaxrl(*arguments: str) -> None:
    if status := cli.main(arguments):
        raise SystemExit(status)


def run_cell(directory: Path, cell: Cell, *, seed: int) -> None:
    """Trains one run."""
    algorithm, training, served = cell
    precision = PRECISIONS[training]
    if training != served:
        precision += f",wire={SAMPLERS[served]},sampler={SAMPLERS[served]}"
    keys = {
        "seed": seed,
        "run_dir": directory / "runs" / f"{'-'.join(cell)}-{seed}",
        "model.path": directory / "base" / "model",
        "data.path": directory / "perfectible.jsonl",
        "loss.name": ALGORITHMS[algorithm],
        "precision": precision,
    }
    trained(CONFIG, keys)


def found_cells(directory: Path) -> dict[Cell, list[Entries]]:
    """Reads the finished runs, sorted by seed."""
    return found(directory / "runs", {cell: f"{'-'.join(cell)}-[0-9]*" for cell in CELLS})


def collapse(accuracy: np.ndarray) -> int | None:
    """Finds the first rollout at which a smoothed curve is below half of its maximum so far."""
    fallen = np.flatnonzero(accuracy < 0.5 * np.maximum.accumulate(accuracy))
    return int(fallen[0]) + 1 if fallen.size else None


def clipped(entries: Entries) -> float:
    """Averages the share of clipped tokens over a run; NaN if the loss does not clip."""
    return float(sum(curve([entries], name).mean() for name in ("clip/low", "clip/high")))


def table(results: Mapping[Cell, Sequence[Entries]]) -> str:
    """Formats a line for each cell of the grid, over its seeds."""
    rows = []
    for cell, runs in results.items():
        named = dict(zip(("algorithm", "training", "sampler"), cell, strict=True))
        rows.append(named | columns(runs))
    return markdown(rows)


def columns(runs: Sequence[Entries]) -> dict[str, str]:
    """Summarises runs that differ in their seed."""
    accuracy = 100 * smooth(curve(runs, "reward"))
    fallen = [c for c in map(collapse, accuracy) if c is not None]
    # The probe runs before an update, so it measures numerical error only.
    halves = np.array_split(curve(runs, "probe/sequence_std"), 2, axis=1)
    first, second = (spread(np.nanmean(part, axis=1), "{:.1e}") for part in halves)
    return {
        "accuracy, first": spread(accuracy[:, 0], "{:.1f}"),
        "best": spread(accuracy.max(1), "{:.1f}"),
        "final": spread(accuracy[:, -1], "{:.1f}"),
        "collapse": ", ".join(map(str, fallen)) or "none",
        "clipped": spread([clipped(run) for run in runs]),
        "sequence log-ratio std, first half": first,
        "second half": second,
    }


def check_direction(directory: Path) -> list[str]:
    """Measures beta of one rollout of a small model with a bf16 and an fp16 sampler.

    Returns:
      Lines to print.

    Raises:
      AssertionError: unless fp16's standard deviation is at most a quarter of bf16's.
    """
    make_arithmetic.write_model(directory / "model", SMALL, seed=0)
    rows = [{"prompt": f"{i}+{i * i}=", "answer": str(i + i * i)} for i in range(10, 26)]
    make_arithmetic.write_rows(directory / "prompts.jsonl", rows)
    keys = {"model.path": directory / "model", "data.path": directory / "prompts.jsonl"}
    keys |= SHORT | {"train.row_length": 36, "train.microbatch_tokens": 576}
    std, rollouts = {}, []
    for name in ("bf16", "fp16"):
        half = SAMPLERS[name]
        own = {"precision": f"fp32,wire={half},sampler={half}", "run_dir": directory / name}
        with open_run(config(CONFIG, keys | own)) as (run, state, progress):
            rollouts = rollouts or scoring.sampled(run, progress)
            scored = scoring.score(run, state.policy, scoring.minibatch(run, rollouts))
        std[name] = float(np.nanstd(scored.learner - scored.shadow))
    assert 0 < std["fp16"] <= std["bf16"] / 4, std
    ratio = f"bf16 / fp16: {std['bf16'] / std['fp16']:.1f}"
    return [*(f"beta std {value:.5f}: f32 learner, {name}" for name, value in std.items()), ratio]
