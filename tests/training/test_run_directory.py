"""Files of a run directory: complete at any time for concurrent readers."""

import time
from importlib import metadata

import jax
import pytest

from jaxrl.builders.weight_sync import run_learner
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training import rollbacks
from jaxrl.training.run_directory import check_config, record_start
from tests.training.test_rollbacks import config, decide, write_steps


def test_concurrent_reader_sees_a_complete_config(tmp_path):
    path, made = tmp_path / "config.toml", config(tmp_path)
    check_config(tmp_path, made)
    write_steps(tmp_path, upto=12)
    first = path.read_text()
    with path.open() as reading:
        check_config(tmp_path, config(tmp_path, checkpoint__keep="9"))
        assert reading.read() == first
    second = path.read_text()
    assert second != first
    decide(made, at=12, healthy=7)
    with path.open() as reading:
        rollbacks.settle(tmp_path, made)
        assert reading.read() == second
    assert path.read_text() != second


def test_starts_record_versions(tmp_path):
    record_start(tmp_path, step=7, devices=jax.devices())
    (start,) = read_metrics(tmp_path / "starts.jsonl")
    assert (start["step"], start["devices"]) == (7, "8 x cpu")
    assert start["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("version", ["1.2.3", None])
def test_starts_record_jaxrl_installed_or_not(version, tmp_path, monkeypatch):
    def found(name):
        if name == "jaxrl" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version or "9"

    monkeypatch.setattr(metadata, "version", found)
    record_start(tmp_path, step=0, devices=jax.devices())
    (start,) = read_metrics(tmp_path / "starts.jsonl")
    assert start["versions"]["jaxrl"] == (version or "source tree")


def test_each_start_is_a_later_learner_though_the_clock_steps_back(tmp_path, monkeypatch):
    """A server refuses an earlier process of a run: its request to connect may come late."""
    sessions = []
    for now in (2e9, 2e9, 1e9, 1e9 + 10, 2e9 + 1):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        record_start(tmp_path, step=0, devices=jax.devices())
        sessions.append(run_learner(tmp_path).session)
    assert sessions == sorted(set(sessions))
    assert {len(session) for session in sessions} == {16}
