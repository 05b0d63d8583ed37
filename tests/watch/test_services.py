import sys
from types import SimpleNamespace

import pytest

from jaxrl.config.tracking import TrackingConfig
from jaxrl.watch.services import open_services
from jaxrl.watch.tracking import open_tracker


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for both packages, which are too large to install for this."""
    seen = []

    def noted(name):
        return lambda *args, **kwargs: seen.append((name, *args, kwargs))

    def init(**kwargs):
        seen.append(("wandb.init", kwargs))
        names = ("define_metric", "log", "finish")
        return SimpleNamespace(id="abc", **{name: noted(f"wandb.{name}") for name in names})

    def start_run(**kwargs):
        seen.append(("mlflow.start_run", kwargs))
        return SimpleNamespace(info=SimpleNamespace(run_id="xyz"))

    names = ("set_experiment", "log_params", "log_metrics", "end_run")
    mlflow = SimpleNamespace(
        start_run=start_run, **{name: noted(f"mlflow.{name}") for name in names}
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return seen


def track(directory, *, start):
    config = TrackingConfig(wandb="project", mlflow="experiment")
    services = open_services(config, directory, resolved={"train.steps": 2})
    with open_tracker(directory, start_step=start, total_steps=2, services=services) as tracker:
        tracker.log(start + 1, {"reward": 0.5})
        tracker.event(start + 1, {"alarm": "kl_spike", "value": 3.0, "action": "log"})


def test_metrics_and_alarms_are_sent_and_a_resumed_run_goes_on_there(calls, tmp_path):
    track(tmp_path, start=0)
    first = list(calls)
    assert ("wandb.log", {"step": 1, "reward": 0.5}, {}) in first
    assert ("mlflow.log_metrics", {"reward": 0.5}, {"step": 1}) in first
    assert ("mlflow.log_metrics", {"alarm/kl_spike": 3.0}, {"step": 1}) in first
    assert ("mlflow.log_params", {"train.steps": 2}, {}) in first
    assert first[-2:] == [("wandb.finish", {}), ("mlflow.end_run", {})]
    begun = dict(c for c in first if c[0] == "wandb.init")["wandb.init"]
    assert (begun["project"], begun["id"], begun["resume"]) == ("project", None, "allow")
    calls.clear()
    track(tmp_path, start=1)
    begun = dict(c for c in calls if c[0] == "wandb.init")["wandb.init"]
    assert begun["id"] == "abc"
    assert ("mlflow.start_run", {"run_id": "xyz"}) in calls


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"tracking\.wandb needs the package wandb: pip install"):
        open_services(TrackingConfig(wandb="p"), tmp_path, resolved={})
    assert open_services(TrackingConfig(), tmp_path, resolved={}) == []
