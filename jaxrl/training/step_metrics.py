"""Metrics that a step derives from its rollouts and timings."""

import numpy as np

from jaxrl.monitoring.completion_metrics import completion_metrics
from jaxrl.training.rollouts.collect import RolloutBatch
from jaxrl.training.timing import Numbers


def step_metrics(rollouts: RolloutBatch, numbers: Numbers) -> Numbers:
    """Returns all metrics of a step: `numbers`, and lengths, throughput and diversity."""
    lengths = np.array([len(r.completion) for r in rollouts.sampled])
    tokens = sum(r.length for r in rollouts.batch)
    derived = {
        "completion_length": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "completion/truncated": float(np.mean([r.truncated for r in rollouts.sampled])),
        "tokens_per_second": tokens / numbers["time/step"],
        "tokens_per_second/sample": float(lengths.sum()) / max(numbers["time/sample"], 1e-9),
        "tokens_per_second/learn": tokens / numbers["time/learn"],
        # Without a reference model: the divergence from the policy that was sampled.
        "kl": numbers.get("kl/reference", numbers.get("mismatch/k3_kl", float("nan"))),
    }
    return completion_metrics(rollouts.sampled) | numbers | derived
