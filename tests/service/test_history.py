"""The metrics of tenants' steps, for the page."""

import json

import numpy as np
import pytest

from jaxrl.commands.report.charts import drawn
from jaxrl.service import history as history_module
from jaxrl.service.history import History
from jaxrl.service.wire import Batch, Datum


def batch(count: int) -> Batch:
    tokens = np.zeros(count, np.int32)
    return Batch([Datum(tokens, tokens[:, None], {}, True)], "ppo", False)


def test_a_step_has_the_sums_and_means_of_its_requests():
    history = History()
    for count, loss, divergence in ((3, 6.0, 0.1), (1, 2.0, 0.5)):
        metrics = {"loss:sum": loss, "mismatch/k3_kl:mean": divergence}
        history.computed("a", batch(count), metrics=metrics)
    assert history.counts() == {}
    history.stepped("a", {"grad_norm": 4.0})
    history.computed("a", batch(2), metrics={"loss:sum": np.nan})
    history.stepped("a", {"grad_norm": 5.0})
    run = history.runs(["a", "unknown"]).pop("a")
    json.dumps(run, allow_nan=False)
    series = run["series"]
    assert (run["last_step"], history.counts()) == (2, {"a": 2})
    assert series["grad_norm"] == [[1, 2], [4.0, 5.0]]
    assert series["loss"] == [[1], [2.0]]
    assert series["mismatch/k3_kl"] == [[1], pytest.approx([0.2])]


def test_alpha_and_beta_are_those_of_all_tokens_with_a_shadow():
    history, draws = History(), np.random.default_rng(0)
    parts = [draws.normal(mean, 0.1, count) for mean, count in ((0.3, 5), (-0.2, 9))]
    for part in parts:
        names = {"alpha": part.mean(), "alpha_std": part.std(), "beta": 0.0, "beta_std": 0.25}
        metrics = {"loss:sum": 0.0} | {f"probe/{k}:mean": v for k, v in names.items()}
        history.computed("a", batch(len(part)), metrics=metrics)
    history.computed("a", batch(50), metrics={"loss:sum": 0.0})  # without a shadow
    history.stepped("a", {})
    series = history.runs(["a"])["a"]["series"]
    deviation = np.concatenate(parts).std()
    assert series["probe/alpha_std"] == [[1], [pytest.approx(deviation, rel=1e-5)]]
    assert series["probe/beta_std"] == [[1], [0.25]]
    assert series.keys() <= drawn(series)


def test_models_that_stepped_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(history_module, "_MOST_MODELS", 2)
    history = History()
    for model in ("a", "b", "a", "c"):
        history.stepped(model, {"grad_norm": 1.0})
    assert history.counts() == {"a": 2, "c": 1}
