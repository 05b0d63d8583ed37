import sys
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from jaxrl.bridge import free_port
from jaxrl.config.tracking import TrackingConfig
from jaxrl.tracking import services
from jaxrl.tracking.services import open_services
from jaxrl.tracking.tracker import open_tracker, read_metrics


@pytest.fixture
def calls(monkeypatch):
    """Replaces both packages, which are too large for the test environment."""
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


@contextmanager
def opened(directory, *, start, total=2):
    config = TrackingConfig(wandb="project", mlflow="experiment")

    def those(note):
        return open_services(config, directory, resolved={"train.steps": 2}, note=note)

    with open_tracker(directory, start_step=start, total_steps=total, services=those) as tracker:
        yield tracker


SPIKE = {"alarm": "kl_spike", "value": 3.0, "action": "log", "text": "KL 3 nats"}


def track(directory, *, start):
    with opened(directory, start=start) as tracker:
        tracker.log(start + 1, {"reward": 0.5})
        tracker.event(start + 1, SPIKE | {"at": start + 1})


def test_resumed_run_continues_in_services(calls, tmp_path):
    track(tmp_path, start=0)
    first = list(calls)
    assert ("wandb.log", {"step": 1, "reward": 0.5}, {}) in first
    assert ("mlflow.log_metrics", {"reward": 0.5}, {"step": 1}) in first
    assert ("mlflow.log_metrics", {"alarm/kl_spike": 3.0}, {"step": 1}) in first
    assert ("mlflow.log_params", {"train.steps": 2}, {}) in first
    assert first[-2:] == [("wandb.finish", {"exit_code": 255}), ("mlflow.end_run", "KILLED", {})]
    begun = dict(c for c in first if c[0] == "wandb.init")["wandb.init"]
    assert (begun["project"], begun["id"], begun["resume"]) == ("project", None, "allow")
    calls.clear()
    track(tmp_path, start=1)
    begun = dict(c for c in calls if c[0] == "wandb.init")["wandb.init"]
    assert begun["id"] == "abc"
    assert ("mlflow.start_run", {"run_id": "xyz"}) in calls
    assert calls[-2:] == [("wandb.finish", {"exit_code": 0}), ("mlflow.end_run", "FINISHED", {})]


def test_large_config_is_split_for_mlflow(calls, tmp_path):
    many = {f"key{i}": i for i in range(144)}
    open_services(TrackingConfig(mlflow="m"), tmp_path, resolved=many, note=print)
    parts = [c[1] for c in calls if c[0] == "mlflow.log_params"]
    assert [len(part) for part in parts] == [100, 44]
    assert parts[0] | parts[1] == many


def test_a_crashed_run_is_reported_as_failed(calls, tmp_path):
    def crash():
        with opened(tmp_path, start=0) as tracker:
            tracker.log(2, {"reward": 0.5})
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        crash()
    assert calls[-2:] == [("wandb.finish", {"exit_code": 1}), ("mlflow.end_run", "FAILED", {})]


@pytest.mark.parametrize("broken", ["start_run", "log_metrics", "end_run"])
def test_service_outage_does_not_affect_run(broken, calls, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise ConnectionError("503 from the service")

    monkeypatch.setattr(sys.modules["mlflow"], broken, fail)
    with opened(tmp_path, start=0, total=3) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward": step / 4})
            tracker.event(step, SPIKE | {"at": step})
    said = capsys.readouterr().err
    assert said.count("tracking.mlflow failed: ConnectionError('503") == 1
    assert "tracking.wandb" not in said
    kept = [e["reward"] for e in read_metrics(tmp_path / "metrics.jsonl") if "reward" in e]
    assert kept == [0.25, 0.5, 0.75]
    assert [c[1]["reward"] for c in calls if c[0] == "wandb.log" and "reward" in c[1]] == kept


def test_unresponsive_service_is_paused(monkeypatch):
    now, tried = 0.0, []

    class Slow:
        def write(self, step, metrics):
            nonlocal now
            tried.append(step)
            if step < 30:
                now += 2.0  # the timeout
                raise TimeoutError

        def close(self, ending):
            tried.append(ending)

    monkeypatch.setattr(services.time, "monotonic", lambda: now)
    said = []
    service = services.Service("mlflow", Slow, note=said.append)
    for step in range(1, 61):
        service.write(step, {})
        now += 1.0
    service.close("finished")
    assert tried == [1, 21, *range(41, 61), "finished"]
    assert len(said) == 1


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"tracking\.wandb needs the package wandb: pip install"):
        open_services(TrackingConfig(wandb="p"), tmp_path, resolved={}, note=print)
    assert open_services(TrackingConfig(), tmp_path, resolved={}, note=print) == []


def test_prometheus_reads_the_newest_metrics(tmp_path):
    address = f"127.0.0.1:{free_port('127.0.0.1', 0)}"
    config, said = TrackingConfig(prometheus=address), []
    (service,) = open_services(config, tmp_path / "run", resolved={}, note=said.append)
    service.write(1, {"reward": 0.25, "eval/accuracy": 0.5})
    service.write(2, {"reward": 0.75, "kl": float("nan")})
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        lines = page.read().decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        f'jaxrl_metric{{name="{name}",run="run"}} {value}'
        for name, value in [("step", 2.0), ("reward", 0.75), ("eval/accuracy", 0.5), ("kl", "NaN")]
    ]
    other = open_services(config, tmp_path / "run", resolved={}, note=said.append)
    assert "Address already in use" in said[0]  # and the run goes on
    other[0].close("finished")
    service.close("finished")
    assert len(said) == 1
    with pytest.raises(ValueError, match=r"expected HOST:PORT, such as 127"):
        TrackingConfig(prometheus="9400")
