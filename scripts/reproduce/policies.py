"""The two policies of the same weights: as the sampler computes, and as the learner does. Each is
measured by completions of its own."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from experiments.runs import config

from jaxrl.core import Precision
from jaxrl.diagnostics import mean_and_interval
from jaxrl.learner import Checkpoints, checkpoint_view
from jaxrl.training.evaluate import Evaluation
from jaxrl.training.rollouts.generate import RolloutSource
from jaxrl.training.run import open_run

Rewards = dict[int, np.ndarray]  # by step, f64[N, S] of S completions for each of N prompts
Measure = Callable[[RolloutSource], Evaluation]


def as_learner(precision: Precision) -> Precision:
    """Returns the dtype policy whose sampler computes as the learner of `precision` does, from the
    learner's own weights."""
    return dataclasses.replace(precision, wire=precision.params, sampler=precision.compute)


def both(file: Path, keys: Mapping[str, object], *, measure: Measure) -> tuple[Rewards, Rewards]:
    """Measures the initial model and the checkpoints of a finished run, once: as its sampler
    computes, and as its learner does, in an embedded sampler."""
    run_dir = Path(str(keys["run_dir"]))
    own = as_learner(config(file, keys).precision)
    learner = {**keys, "precision": own, "sampler.name": "embedded"}
    return (
        _measured(file, keys, name="sampler", run_dir=run_dir, measure=measure),
        _measured(file, learner, name="learner", run_dir=run_dir, measure=measure),
    )


def _measured(
    file: Path, keys: Mapping[str, object], *, name: str, run_dir: Path, measure: Measure
) -> Rewards:
    kept = run_dir / f"{name}.npz"
    if not kept.exists():
        changed = config(file, {**keys, "run_dir": run_dir / name})
        found = {}
        with (
            open_run(changed) as (run, state, _),
            closing(Checkpoints.reading(run_dir / "checkpoints")) as saved,
        ):
            found[0] = measure(run.source).rewards
            for step in sorted(int(p.name) for p in saved.directory.glob("[0-9]*")):
                like = checkpoint_view(state.policy)
                run.publish(saved.restore(step, like).state.params, version=step)
                found[step] = measure(run.source).rewards
        np.savez(kept, **{str(step): rewards for step, rewards in found.items()})
    with np.load(kept) as found:
        return {int(step): found[step] for step in found}


def difference(learner: np.ndarray, sampler: np.ndarray) -> tuple[float, float]:
    """Returns how much higher the learner's values are, both f64[N, S] on the same N prompts, and
    half the width of the mean's 95 % interval."""
    sums = (learner - sampler).sum(axis=1)
    return mean_and_interval(sums, np.full(len(sums), learner.shape[1]))
