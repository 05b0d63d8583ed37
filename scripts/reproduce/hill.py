"""The question whether gradients in f32 climb the wrong hill: the policy that the sampler
computes and the one that the learner does, along runs whose ratio is clean, and one that fails."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from experiments.runs import markdown, trained
from reproduce import phantom, policies
from reproduce.explanations import CLEAN
from reproduce.policies import Rewards

from jaxrl.training.evaluate import Evaluation, evaluate
from jaxrl.training.rollouts.generate import RolloutSource

COMPARED = {"embedded": [CLEAN], "fp8": [CLEAN, phantom.FAILURE]}
SAMPLES = 2  # completions of each prompt
_SAVED = {"checkpoint.every": 5, "checkpoint.keep": 9}
Row = tuple[str, str]  # sampler, row


def compared(
    directory: Path, *, samplers: Sequence[str], seeds: Sequence[int]
) -> dict[Row, list[tuple[Rewards, Rewards]]]:
    """Trains or reads the runs of those samplers that are compared, and measures the two policies
    of their checkpoints."""
    found = dict[Row, list[tuple[Rewards, Rewards]]]()
    for seed in seeds:
        for sampler in filter(COMPARED.get, samplers):
            for row in COMPARED[sampler]:
                run_dir = phantom.row_dir(directory / f"hill-{sampler}", row, seed=seed)
                more = _SAVED | (phantom.COARSE if sampler == "fp8" else {})
                keys = phantom.row_keys(directory, row, run_dir=run_dir, seed=seed, more=more)
                trained(phantom.CONFIG, keys)
                both = policies.both(phantom.CONFIG, keys, measure=_measure)
                found.setdefault((sampler, row), []).append(both)
    return found


def _measure(source: RolloutSource) -> Evaluation:
    examples = source.task.prompts.examples
    return evaluate(source, examples, params=source.params, samples=SAMPLES)


def table(results: Mapping[Row, Sequence[tuple[Rewards, Rewards]]]) -> str:
    """Formats mean lengths by rollout: of each policy of each row, over its seeds, and how much
    longer the learner's are, with half the width of the 95 % interval."""
    rows = []
    for (sampler, row), runs in results.items():
        lines = dict[str, dict[str, str]]({"sampler's": {}, "learner's": {}, "difference": {}})
        for step in runs[0][0]:
            served, own = (np.concatenate([-run[i][step] for run in runs]) for i in (0, 1))
            more, interval = policies.difference(own, served)
            lines["sampler's"][str(step)] = f"{served.mean():.1f}"
            lines["learner's"][str(step)] = f"{own.mean():.1f}"
            lines["difference"][str(step)] = f"{more:+.1f} ± {interval:.1f}"
        rows += [{"sampler": sampler, "row": row, "policy": k} | v for k, v in lines.items()]
    return markdown(rows)
