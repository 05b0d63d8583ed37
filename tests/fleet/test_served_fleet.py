"""A fleet with vLLM servers on one machine, whose parts come and go while it trains."""

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from jaxrl.cli import main
from jaxrl.fleet.addresses import read_addresses
from jaxrl.fleet.child import _read
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.bridge.engines import VLLM_PYTHON
from tests.processes import XLA_FLAGS
from tests.run_config import run_arguments
from tests.training.small_runs import write_rows

pytestmark = [
    pytest.mark.usefixtures("patient_ray"),
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs scripts/install_vllm.sh"),
    pytest.mark.filterwarnings("default::ResourceWarning", "ignore:os.fork:RuntimeWarning"),
]

REWARD = """
import time

def length(completion, example):
    time.sleep(.3)  # leaves the processors to the servers that start
    return len(completion) / 8
"""

TRAINS = threading.Event()  # while the command of the run runs


def wait_for(reached, what):
    late = time.monotonic() + 300
    while not reached():
        assert time.monotonic() < late, what
        assert TRAINS.is_set(), what
        time.sleep(0.1)


def events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "fleet.jsonl").read_text().splitlines()]


def resize(run: Path) -> None:
    """Adds a server and a worker to a run, removes the server, and ends the run."""

    def last() -> dict[str, float]:
        steps = [entry for entry in read_metrics(run / "metrics.jsonl") if "reward" in entry]
        return steps[-1] if steps else {}

    def answered() -> bool:
        """Tells if the new server has answered requests of the run."""
        try:
            text = _read(f"{read_addresses(run).present[-1]}/metrics")
        except OSError:  # busy for longer than the request waits
            return False
        lines = [s for s in text.splitlines() if s.startswith("vllm:generation_tokens_total{")]
        return float(lines[0].split()[-1]) > 20  # its first request, at the start, has fewer

    try:
        wait_for(lambda: last().get("fleet/workers") == 1, "a step")
        assert main(["fleet", str(run), "--servers", "2", "--workers", "2"]) == 0
        wait_for(lambda: last()["sampler/servers"] == last()["fleet/workers"] == 2, "new parts")
        wait_for(answered, "requests at the new server")
        assert main(["fleet", str(run), "--servers", "1"]) == 0
        removed = {"part": "server 1", "event": "removed"}
        wait_for(lambda: any(removed.items() <= e.items() for e in events(run)), "the removal")
        step = last()["step"]
        wait_for(lambda: last()["step"] >= step + 2 and last()["sampler/servers"] == 1, "steps")
    finally:
        if TRAINS.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def test_servers_and_workers_take_load_in_mid_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of a test that runs beside it
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    wide = dataclasses.replace(tiny.CONFIG, head_dim=32)  # vLLM on a CPU has no smaller heads
    tiny.write_checkpoint(tmp_path / "model", config=wide)
    rows = [{"prompt": f"{i}+{i}=", "answer": "1"} for i in range(9)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "reward.py").write_text(REWARD)
    keys = {
        "reward.path": f"{tmp_path}/reward.py:length",
        "train.steps": 10_000,
        "data.max_prompt_tokens": 24,
        "train.microbatch_tokens": 128,
        "sampler.name": "vllm",
        "sampler.python": VLLM_PYTHON,
        "fleet.engine": "ray",
        "fleet.servers": 1,
        "fleet.workers": 1,
        "fleet.learner_resources": "CPU=0.1",
        "fleet.server_resources": "CPU=0.1",
        "fleet.worker_resources": "CPU=0.1",
    }
    thread = threading.Thread(target=resize, args=(tmp_path / "run",), daemon=True)
    TRAINS.set()
    thread.start()
    try:
        status = main(["train", *run_arguments(tmp_path, **keys)])
    finally:
        TRAINS.clear()
        thread.join()
    assert status == 128 + signal.SIGTERM
    said = capfd.readouterr().err
    assert "1 server on the learner's node: weights go through shared memory" in said
    assert "is new and gets the present weights" in said
    assert "leaves: it finishes its requests" in said
    found = [e["event"] for e in events(tmp_path / "run") if e["part"] == "server 1"]
    assert found == ["started", "ready", "leaving", "removed"]
    assert main(["fleet", str(tmp_path / "run"), "--workers", "3"]) == 1
    assert "ended with status 143" in capfd.readouterr().err
