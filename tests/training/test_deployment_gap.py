"""The gap between learner and sampler on held-out completions, against whole arrays of logits."""

import math

import jax
import numpy as np
import pytest

from jaxrl import train
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.diagnostics.accuracy import mean_and_interval
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training import deployment_gap
from tests.training import small_runs


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return small_runs.write_material(tmp_path_factory.mktemp("material"))


def logprobs(run, params, rollout) -> np.ndarray:
    """Log-probs at temperature 1 from the logits of one sequence, in f32."""
    shape = MinibatchShape(row_length=rollout.length, rows_per_microbatch=1)
    batch = pack_minibatch([rollout], [0.0], shape=shape).batch
    model = run.learning.model
    hidden = model.hidden_of(params, batch, precision="fp32")
    every = jax.nn.log_softmax(hidden[0] @ model.unembedding(params).T)
    first = len(rollout.prompt)
    rows = np.arange(first - 1, rollout.length - 1)
    return np.asarray(every)[rows, rollout.completion].astype(np.float64)


def test_gap_is_the_learners_log_prob_minus_the_samplers(material, tmp_path, monkeypatch):
    """The run's temperature is not the evaluation's: greedy tokens have log-probs at 1."""
    expected, measure = [], deployment_gap.deployment_gap

    def recorded(run, params, *, rollouts):
        mine = np.concatenate([logprobs(run, params, r) for r in rollouts])
        theirs = np.concatenate([r.logprobs for r in rollouts]).astype(np.float64)
        expected.append((theirs.mean(), (mine - theirs).mean()))
        return measure(run, params, rollouts=rollouts)

    monkeypatch.setattr(train, "deployment_gap", recorded)
    changes = {"precision": "phantom", "sampling.temperature": 0.7, "train.steps": 1}
    small_runs.run(material, tmp_path / "run", **changes)
    lines = [m for m in read_metrics(tmp_path / "run/metrics.jsonl") if "eval/deployment_gap" in m]
    assert len(lines) == len(expected) == 2
    for line, (theirs, gap) in zip(lines, expected, strict=True):
        assert line["eval/logprob"] == pytest.approx(theirs, abs=1e-6)
        assert line["eval/deployment_gap"] == pytest.approx(gap, abs=2e-6)
        assert abs(gap) > 2e-5
        assert line["eval/deployment_gap/interval"] > 0


def test_equal_numerics_have_no_gap(material, tmp_path):
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 4}  # the sampler's weights are whole
    changes = {"precision": "fp32,sums=fixed", "train.steps": 1, **mesh}
    small_runs.run(material, tmp_path / "run", **changes)
    lines = [m for m in read_metrics(tmp_path / "run/metrics.jsonl") if "eval/deployment_gap" in m]
    assert [line["eval/deployment_gap"] for line in lines] == [0.0, 0.0]
    assert lines[0]["eval/deployment_gap/interval"] == 0.0


def test_interval_counts_completions_and_not_tokens():
    rng = np.random.default_rng(0)
    sums = rng.normal(3, 2, 50)
    mean, half = mean_and_interval(sums, np.full(50, 4))
    assert mean == pytest.approx(sums.mean() / 4)
    assert half == pytest.approx(1.96 * sums.std(ddof=1) / math.sqrt(50) / 4)
    assert math.isnan(mean_and_interval(sums[:1], np.ones(1))[1])
    lengths = rng.integers(1, 9, 50)
    assert mean_and_interval(0.25 * lengths, lengths) == (0.25, 0.0)


def test_interval_covers_the_mean_of_unequal_clusters():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        lengths = rng.integers(1, 30, 60)
        sums = lengths * rng.normal(0.5, 1, 60)  # the tokens of a completion move together
        mean, half = mean_and_interval(sums, lengths)
        covered += abs(mean - 0.5) <= half
    assert 0.91 < covered / 400 < 0.98
