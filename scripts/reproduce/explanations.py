"""The write-up's other explanations of the stall, measured: weights of gradients distorted by beta,
updates too small for the published words, and the gradient of another policy than the deployed."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from experiments.runs import config, markdown
from reproduce import phantom, scoring
from reproduce.grid import Entries, early

from jaxrl.learner import Checkpoints, checkpoint_view
from jaxrl.training.run import open_run

CLEAN = "beta removed: ratio over the anchor, clipped"
COMPARED = {  # sampler -> rows
    "embedded": [phantom.FAILURE, CLEAN, "r = 1"],
    "fp8": [phantom.FAILURE, "r = 1", phantom.SHADOWED],
}
POLICIES = {"deployed, bf16": "phantom", "learner's own, f32": "fp32"}
_EVERY, _PROMPTS = 5, 32  # rollouts between two measurements, prompts of each


def compared(directory: Path, *, seed: int) -> dict[tuple[str, str], Entries]:
    """Trains or reads the compared rows of each sampler."""
    return {
        (sampler, row): phantom.run_row(
            directory,
            row,
            run_dir=phantom.row_dir(directory / sampler, row, seed=seed),
            seed=seed,
            more=phantom.COARSE if sampler == "fp8" else {},
        )
        for sampler, rows in COMPARED.items()
        for row in rows
    }


def table(results: Mapping[tuple[str, str], Entries]) -> str:
    """Formats a line for each run: means over the first ten rollouts."""
    columns = {
        "correlation of the weights": ("probe/weight_correlation", "{:.3f}"),
        "their difference": ("probe/weight_difference", "{:.3f}"),
        "words changed by a step": ("publish/changed", "{:.3f}"),
        "norm at the others": ("publish/absorbed", "{:.3f}"),
        "phantom": ("probe/phantom", "{:.3f}"),
    }
    rows = []
    for (sampler, row), entries in results.items():
        lengths = [-np.mean([e["reward"] for e in part]) for part in (entries[:1], entries[-5:])]
        shown = {"sampler": sampler, "row": row, "length": " -> ".join(f"{x:.1f}" for x in lengths)}
        found = {k: form.format(early([entries], n)[0]) for k, (n, form) in columns.items()}
        rows.append(shown | found)
    return markdown(rows)


def climbed(directory: Path, *, seed: int) -> dict[str, dict[int, float]]:
    """Trains the row with a clean ratio and samples from its checkpoints in the dtypes of
    `POLICIES`, with the same prompts and random numbers; returns the mean length by step."""
    run_dir = directory / f"climbed-{seed}"
    kept = {"checkpoint.every": str(_EVERY), "checkpoint.keep": "99"}
    entries = phantom.run_row(directory, CLEAN, run_dir=run_dir, seed=seed, more=kept)
    steps = [0, *range(_EVERY, len(entries) + 1, _EVERY)]
    keys = {"model.path": directory / f"model-{seed}", "data.path": directory / "prompts.jsonl"}
    keys |= {"seed": seed, "train.train_batch": _PROMPTS}
    found = {}
    for policy, precision in POLICIES.items():
        own = {"precision": precision, "run_dir": directory / f"sampled-{seed}-{precision}"}
        with open_run(config(phantom.CONFIG, keys | own)) as (run, state, progress):
            found[policy] = {}
            saved = Checkpoints(run_dir / "checkpoints", keep=99)
            for step in steps:
                params = state.policy.params
                if step:
                    like = checkpoint_view(state.policy)
                    params = saved.restore(step, like).state.params
                progress.position = 0  # the same prompts at each step
                run.publish(params, version=0)
                rewards = [r.reward for r in scoring.sampled(run, progress)]
                found[policy][step] = -float(np.mean(rewards))
            saved.close()
    return found


def climbed_table(found: Mapping[str, Mapping[int, float]]) -> str:
    """Formats a line for each policy: the mean length at each step."""
    return markdown(
        [
            {"policy": policy} | {str(step): f"{length:.1f}" for step, length in lengths.items()}
            for policy, lengths in found.items()
        ]
    )
