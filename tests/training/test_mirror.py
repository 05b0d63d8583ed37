"""Runs in a bucket: at every moment it holds a run that any machine resumes, bit for bit."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.bridge import Bucket, StoreError
from jaxrl.commands.export.command import main as export
from jaxrl.commands.generate import main as generate
from jaxrl.commands.report.command import main as report
from jaxrl.commands.watch import main as watch
from jaxrl.config.bucket import local_directory
from jaxrl.learner import Checkpoints
from jaxrl.training import resume
from jaxrl.training.manifest import Lease, LostError
from jaxrl.training.progress import Progress
from jaxrl.training.run_directory import ResumeError
from tests.bridge.store.fake_bucket import BUCKET, FakeBucket
from tests.processes import XLA_FLAGS, ModuleProcess
from tests.run_config import run_arguments
from tests.training.small_runs import REWARD, run, state, supervised, write_material

URL = f"s3://{BUCKET}/some/run"
STEPS = 4
# In its third step at the latest, the process waits until it is killed.
HELD = f"import itertools, os, threading\ncalls = itertools.count()\n{REWARD}".replace(
    "return",
    "if 'HELD' in os.environ and next(calls) >= 28:\n        threading.Event().wait()\n    return",
)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def local(material: Path) -> Path:
    """The same run in a directory."""
    run(material, material / "local", train__steps=STEPS)
    return material / "local"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBucket]:
    with FakeBucket() as bucket:
        prepare(monkeypatch, bucket, tmp_path)
        yield bucket


def prepare(monkeypatch: pytest.MonkeyPatch, bucket: FakeBucket, directory: Path) -> None:
    """Uses a bucket from one machine, with short pauses."""
    for name, value in (bucket.environment | bucket.google_environment(directory)).items():
        monkeypatch.setenv(name, value)
    at(monkeypatch, directory / "here")
    for name, value in {"_SILENCE": 0.5, "_BEAT": 0.1}.items():
        monkeypatch.setattr(f"jaxrl.training.manifest.{name}", value)
    for name, value in {"_POLL": 0.01, "_LOGS": 0.05, "_SHARE": 0, "_AGAIN": 0.1}.items():
        monkeypatch.setattr(f"jaxrl.training.mirror.{name}", value)


def at(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    """Goes to another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine))


def test_bucket_holds_a_resumable_run_after_every_request(
    material: Path, local: Path, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moments: list[dict[str, tuple[int, bytes]]] = []

    def record(method: str, name: str) -> None:
        if method != "GET":
            moments.append(dict(bucket.objects))

    def save(checkpoints: Checkpoints, *args: Any, progress: Progress, **named: Any) -> None:
        resume.save(checkpoints, *args, progress=progress, **named)
        checkpoints.wait()
        until = time.monotonic() + 250
        while progress.step not in saved(files(bucket)):
            assert time.monotonic() < until
            time.sleep(0.01)

    monkeypatch.setattr("jaxrl.train.save", save)
    bucket.refuse = record
    result = run(material, URL, train__steps=STEPS)
    bucket.refuse = lambda method, name: None
    assert state(local_directory(URL), STEPS) == state(local, STEPS)
    assert result.step == STEPS

    cut: dict[int, dict] = {}  # the first moment at which the newest checkpoint is of a step
    for objects in moments:
        if (written := objects.get("some/run/run.json")) is None:
            continue
        listed = json.loads(written[1])["files"]
        for path, entry in listed.items():
            size = len(objects[f"some/run/{entry['object']}"][1])
            # Logs of TensorBoard are written again under their name.
            assert size == entry["size"] or (
                path.startswith("tensorboard") and size > entry["size"]
            )
        if there := saved(listed):
            cut.setdefault(max(there), objects)
    assert set(cut) == {*range(1, STEPS + 1)}

    monkeypatch.undo()
    prepare(monkeypatch, bucket, tmp_path)
    for number, objects in enumerate((cut[1], cut[STEPS])):
        bucket.objects = objects
        at(monkeypatch, tmp_path / str(number))
        run(material, URL, train__steps=STEPS)
        mirror = local_directory(URL)
        for step in range(2, STEPS + 1):
            assert state(mirror, step) == state(local, step)
        weights = "model/model.safetensors"
        assert (mirror / weights).read_bytes() == (local / weights).read_bytes()
        assert bucket.objects[f"some/run/{weights}"][1] == (local / weights).read_bytes()
        assert [line["step"] for line in lines(mirror / "metrics.jsonl") if "reward" in line] == [
            *range(1, STEPS + 1)
        ]


def test_killed_run_goes_on_elsewhere(
    material: Path, local: Path, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (material / "held.py").write_text(HELD)
    own = {
        "data.eval_path": material / "held_out.jsonl",
        "data.max_prompt_tokens": 24,
        "reward.path": f"{material}/held.py:early_letters",
        "train.train_batch": 3,
        "train.microbatch_tokens": 128,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
    }
    arguments = run_arguments(material, run_dir=URL, train__steps=STEPS, **own)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS, "HELD": "1"}
    log = tmp_path / "log"
    process = ModuleProcess("jaxrl.cli", ["train", *arguments], output=log, environment=environment)
    while "some/run/run.json" not in bucket.objects or not saved(files(bucket)):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert max(saved(files(bucket))) < STEPS
    at(monkeypatch, tmp_path / "there")
    run(material, URL, train__steps=STEPS, reward__path=own["reward.path"])
    assert state(local_directory(URL), STEPS) == state(local, STEPS)
    starts = lines(local_directory(URL) / "starts.jsonl")
    assert len(starts) == 2


def test_second_program_is_refused(bucket: FakeBucket, monkeypatch, tmp_path: Path) -> None:
    now, beating = 0.0, True

    def sleep(seconds: float) -> None:
        """Pauses of the second program, in which the first one works."""
        nonlocal now
        now += seconds
        if beating:
            first.beat()

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr("jaxrl.training.manifest.time", clock)
    first = Lease(Bucket(URL), last=None)
    with pytest.raises(ResumeError, match=r"process .* trains in s3://a-bucket/some/run; wait"):
        Lease(Bucket(URL), last=None)
    beating = False
    second = Lease(Bucket(URL), last=None)  # the first one is silent now
    with pytest.raises(LostError, match=r"has taken the run over; this one stops"):
        first.write()
    second.write(training=False)
    Lease(Bucket(URL), last=None).write(training=False)  # at once


def test_two_programs_of_one_machine(bucket: FakeBucket, material: Path) -> None:
    root = local_directory(URL).parent
    root.mkdir(parents=True)
    descriptor = os.open(root, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ResumeError, match=r"another program on this machine trains in s3://"):
        run(material, URL)
    os.close(descriptor)


def test_run_survives_a_bucket_that_fails(
    material: Path, local: Path, bucket: FakeBucket, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = []

    def refuse(method: str, name: str) -> int | None:
        wrong = method == "PUT" and "/checkpoints/" in name and len(refused) < 3
        if wrong:
            refused.append(name)
        return 403 if wrong else None

    bucket.refuse = refuse
    run(material, URL, train__steps=STEPS)
    assert refused
    weights = "model/model.safetensors"
    assert bucket.objects[f"some/run/{weights}"][1] == (local / weights).read_bytes()
    listed = {f"some/run/{e['object']}" for e in files(bucket).values()} | {"some/run/run.json"}
    assert set(bucket.objects) == listed  # nothing is left over

    bucket.refuse = lambda method, name: 403 if method == "PUT" and "run.json" not in name else None
    with pytest.raises(StoreError, match=r"the last upload failed.*rerun the same command"):
        run(material, URL, train__steps=STEPS + 1)
    bucket.refuse = lambda method, name: 403 if method == "GET" and "checkpoints" in name else None
    run(material, URL, train__steps=STEPS + 1)  # goes on from the mirror, without a fetch
    assert any(path.startswith(f"checkpoints/{STEPS + 1}/") for path in files(bucket))


def saved(listed: dict) -> list[int]:
    return [int(path.split("/")[1]) for path in listed if path.startswith("checkpoints/")]


def files(bucket: FakeBucket) -> dict:
    return json.loads(bucket.objects["some/run/run.json"][1])["files"]


def test_errors_name_the_address(bucket: FakeBucket, material: Path) -> None:
    with pytest.raises(StoreError, match=r"run_dir = 's3://other/run' cannot be used.*must exist"):
        run(material, "s3://other/run")
    bucket.refuse = lambda method, name: 403
    with pytest.raises(StoreError, match=r"run_dir = 's3://a-bucket/some/run'.*credentials"):
        run(material, URL)
    bucket.refuse = lambda method, name: None
    bucket.objects["some/run/run.json"] = (1, b"{}")
    with pytest.raises(ValueError, match=r"run.json is not the list of a run's files: Field req"):
        run(material, URL)
    for wrong in ("s3://a-bucket", "http://host/run", "s3://a@b/run", "s3://a/b/.."):
        with pytest.raises(ValueError, match=r"run_dir.*expected a directory, s3://BUCKET/PATH"):
            run(material, wrong)


def test_commands_read_a_run_of_a_bucket(
    material: Path, local: Path, bucket: FakeBucket, monkeypatch, capsys, tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/tuned"
    supervised(material, url)  # the same code for Google's storage, and for texts
    supervised(material, material / "tuned")
    at(monkeypatch, tmp_path / "reader")
    watch([url, "--once"])
    assert "2/2" in capsys.readouterr().out
    report([url, "--out", str(tmp_path / "report.html")])
    assert '"path": ' in (tmp_path / "report.html").read_text()
    export([url, str(tmp_path / "exported")])
    weights = "model.safetensors"
    expected = (material / "tuned" / "model" / weights).read_bytes()
    assert (tmp_path / "exported" / weights).read_bytes() == expected
    supervised(material, material / "forked", fork=f"{url}@1")
    assert state(material / "forked", 2) == state(material / "tuned", 2)
    generate([f"--model.path={url}/model", "--greedy", "--sampling.max_tokens=2", "1+1="])
    assert not (local_directory(url)).exists()
    with pytest.raises(ValueError, match=r"is not a run: there is no s3://a-bucket/none/run.json"):
        watch([f"s3://{BUCKET}/none"])
    with pytest.raises(ValueError, match=r"model.path = 's3.*the run s3://.*/tuned has no critic"):
        generate([f"--model.path=s3://{BUCKET}/tuned/critic", "a"])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
