"""Whole runs through a real Ray of three nodes: equality, deaths, and what cannot be placed."""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

from jaxrl.cli import main
from jaxrl.tracking.tracker import read_metrics
from tests.fleet.conftest import started
from tests.processes import XLA_FLAGS
from tests.run_config import run_arguments
from tests.training.small_runs import write_material

pytestmark = [
    # Ray forks, while jax may run in this process already; the child starts a program at once.
    pytest.mark.filterwarnings("default::ResourceWarning", "ignore:os.fork:RuntimeWarning")
]

# Its first call ends the process that makes it, and leaves a mark. Later ones wait after two steps,
# so that the run cannot end before it is disturbed.
REWARD = """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent
MARK, STEPS = HERE / "mark", HERE / "fleet" / "metrics.jsonl"

def early_letters(completion, example):
    if not MARK.exists():
        MARK.touch()
        os._exit(1)
    while STEPS.exists() and STEPS.read_text().count("\\n") >= 2:
        if (HERE / "disturbed").exists():
            break
        time.sleep(.02)
    return sum(c in "abcdefghijklm" for c in completion) / 8 + (example["answer"] in completion)
"""


@pytest.fixture(scope="module")
def cluster(patient_ray: None) -> Iterator[Cluster]:
    one = {"num_cpus": 1, "resources": {"L": 1}}
    found = started(lambda: Cluster(initialize_head=True, head_node_args=one))
    for more in (one, {"num_cpus": 2}):
        started(functools.partial(found.add_node, **more))
    yield found
    found.shutdown()


@pytest.fixture
def in_cluster(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)


def arguments(directory: Path, name: str, **changes) -> list[str]:
    own = {
        "run_dir": directory / name,
        "reward.path": f"{directory}/reward.py:early_letters",
        "train.steps": 4,
        "train.train_batch": 3,
        "data.max_prompt_tokens": 24,
        "train.microbatch_tokens": 128,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
    }
    return ["train", *run_arguments(directory, **own | changes)]


FLEET = {"fleet.engine": "ray", "fleet.wait": 300, "fleet.learner_resources": "CPU=1,L=1"}


def events(run_dir: Path) -> list[tuple[str, str]]:
    lines = (run_dir / "fleet.jsonl").read_text().splitlines()
    return [(one["part"], one["event"]) for one in map(json.loads, lines)]


def learners(run_dir: Path) -> list[psutil.Process]:
    """Processes of a run's learner hosts; the test itself is the command."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if f"--run_dir={run_dir}" in (p.info["cmdline"] or ())]


def kill_after(step: int, run_dir: Path) -> threading.Thread:
    """Asks for three workers and kills a learner host once a step is done."""

    def work() -> None:
        while len(read_metrics(run_dir / "metrics.jsonl")) < step:
            time.sleep(0.05)
        try:
            assert main(["fleet", str(run_dir), "--workers", "3"]) == 0
            while ("worker 2", "started") not in events(run_dir):
                time.sleep(0.05)
            os.kill(learners(run_dir)[-1].pid, signal.SIGKILL)
        finally:
            (run_dir.parent / "disturbed").touch()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_run_with_deaths_equals_the_run_without_a_fleet(tmp_path, in_cluster, capfd):
    write_material(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    fleet = FLEET | {"fleet.workers": 2}
    killer = kill_after(2, tmp_path / "fleet")
    assert main(arguments(tmp_path, "fleet", **fleet)) == 0
    killer.join()
    said = capfd.readouterr()
    assert "model: " in said.out
    assert "died (killed by signal 9); restart 1 of 3" in said.err
    assert events(tmp_path / "fleet").count(("learner 0", "started")) == 2
    assert events(tmp_path / "fleet").count(("worker 2", "started")) == 1
    assert "3 workers asked for, 2 before" in said.err
    assert (tmp_path / "mark").exists()
    assert not learners(tmp_path / "fleet")

    assert main(arguments(tmp_path, "alone")) == 0
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("fleet", "alone")]
    for ours, theirs in zip(*rows, strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert ours[name] == theirs[name]
    ours, theirs = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("fleet", "alone")
    )
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array, err_msg=key)


def test_two_hosts_train_one_model(tmp_path, in_cluster):
    write_material(tmp_path)
    keys = FLEET | {"fleet.learners": 2, "mesh.fsdp": 2, "train.steps": 1}
    assert main(arguments(tmp_path, "fleet", **keys)) == 0
    begun = [part for part, event in events(tmp_path / "fleet") if event == "started"]
    assert begun == ["learner 0", "learner 1"]
    log = (tmp_path / "fleet" / "logs" / "learner-1.log").read_text()
    assert "process 1 of 2 is waiting for the others" in log
    assert len(read_metrics(tmp_path / "fleet" / "metrics.jsonl")) == 1
    assert (tmp_path / "fleet" / "model" / "model.safetensors").exists()


def test_what_cannot_be_placed_is_named(tmp_path, in_cluster, capsys):
    write_material(tmp_path)
    keys = FLEET | {"fleet.wait": 0.1, "fleet.workers": 9}
    assert main(arguments(tmp_path, "run", **keys)) == 1
    said = capsys.readouterr().err
    assert "CPU: 10 asked for (1 learner host x 1 + 9 workers x 1), and the cluster has 4" in said
    assert not learners(tmp_path / "run")
