"""Real processes on this machine: what they share, how they end, and a whole run in them."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.bridge import free_port
from jaxrl.cli import main
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.processes import XLA_FLAGS, ModuleProcess
from tests.run_config import run_keys

DEVICES = 4  # of all processes together
STEPS = 6


def free_address() -> str:
    return f"127.0.0.1:{free_port('127.0.0.1', 0)}"


@contextmanager
def started(
    commands: Sequence[Sequence[str]], logs: Path, variables: Sequence[dict[str, str]] = ()
) -> Iterator[list[ModuleProcess]]:
    """Processes of a module and its arguments, each with its part of the devices, its log and
    its environment variables."""
    flags = f"--xla_force_host_platform_device_count={DEVICES // len(commands)}"
    environment = os.environ | {"XLA_FLAGS": f"{XLA_FLAGS} {flags}"}
    processes: list[ModuleProcess] = []
    try:
        for i, (module, *arguments) in enumerate(commands):
            (logs / f"{i}.log").write_text("")
            own = environment | (variables[i] if variables else {})
            processes.append(
                ModuleProcess(module, arguments, output=logs / f"{i}.log", environment=own)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def children(
    name: str, directory: Path, *, count: int, address: str | None = None
) -> list[list[str]]:
    child = ["tests.training.hosts_child", name, address or free_address()]
    return [[*child, str(count), str(i), str(directory)] for i in range(count)]


def wait_for(text: str, log: Path, process: ModuleProcess) -> None:
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)


def test_hanging_process_ends_all_four(tmp_path):
    with started(children("whole", tmp_path, count=4), tmp_path) as processes:
        for i, process in enumerate(processes):
            wait_for("whole", tmp_path / f"{i}.log", process)
        processes[3].send_signal(signal.SIGSTOP)  # the others hang in a collective
        since = time.monotonic()
        for process in processes[:3]:
            assert process.wait() != 0
        assert time.monotonic() - since < 200
    assert "another task died" in (tmp_path / "0.log").read_text()


def test_join_timeout_is_reported(tmp_path):
    address = [free_address() for _ in range(2)]  # of two runs
    alone = [children("alone", tmp_path, count=2, address=address[i])[i] for i in range(2)]
    with started(alone, tmp_path) as processes:
        assert [process.wait() for process in processes] == [1, 1]
    for i in range(2):
        lines = (tmp_path / f"{i}.log").read_text().splitlines()
        assert [line for line in lines if line.startswith("jaxrl:")] == [
            f"jaxrl: process {i} of 2 is waiting for the others at {address[i]}, at most 1 s",
            f"jaxrl: process {i} of 2 failed: not all processes joined at {address[i]} within "
            "1 s. See their output; check that all have this address and can reach it",
        ]


def test_error_on_process_0_ends_all(tmp_path):
    with started(children("failing", tmp_path, count=2), tmp_path) as processes:
        assert [process.wait() for process in processes] == [1, 1]
    first, second = ((tmp_path / f"{i}.log").read_text() for i in range(2))
    assert "jaxrl: process 0 of 2 failed: nothing to read" in first
    assert "jaxrl: process 1 of 2 failed: process 0: nothing to read" in second
    assert "Traceback" not in first + second


def test_interrupted_process_does_not_wait(tmp_path):
    with started(children("interrupted", tmp_path, count=2), tmp_path) as processes:
        assert processes[1].wait() == 130
        since = time.monotonic()
        assert processes[0].wait() != 0
        assert time.monotonic() - since < 200
    assert "jaxrl: process 1 of 2 failed: interrupted" in (tmp_path / "1.log").read_text()


def test_unshared_run_directory_is_an_error(tmp_path):
    with started(children("apart", tmp_path, count=2), tmp_path) as processes:
        assert [process.wait() for process in processes] == [1, 1]
    for i in range(2):
        text = (tmp_path / f"{i}.log").read_text()
        assert f"disk_of_{i}/run' is not the same directory on all hosts: process 1 does" in text
        assert not (tmp_path / f"disk_of_{i}" / "run").exists()


def test_different_keys_are_an_error_on_all(tmp_path):
    """Before the model is read: its directory is empty. Another place of a file is no difference,
    but without one a process would leave out what the others do together."""
    (tmp_path / "model").mkdir()
    for name in ("prompts", "held_out"):
        (tmp_path / f"{name}.jsonl").touch()
    every = run_keys(tmp_path, **{"run_dir": tmp_path / "run", "train.steps": 2})
    first, second = of_processes("train", every, count=2)
    second += ["--loss.clip_high", "0.3", "--run_dir", str(tmp_path / "elsewhere")]
    second += ["--data.eval_path", str(tmp_path / "held_out.jsonl")]
    with started([first, second], tmp_path) as processes:
        assert [process.wait() for process in processes] == [1, 1]
    for i in range(2):
        text = (tmp_path / f"{i}.log").read_text()
        assert "processes 0 and 1 differ in data.eval_path = none and '" in text
        assert "; loss.clip_high = " in text
        assert "run_dir" not in text
        assert " and 0.3; start the same command" in text


def test_damaged_checkpoint_is_an_error_on_all(tmp_path):
    with started(children("damaged", tmp_path, count=2), tmp_path) as processes:
        for i, process in enumerate(processes):
            wait_for("damaged", tmp_path / f"{i}.log", process)
        since = time.monotonic()
        assert all(process.wait() != 0 for process in processes)
        assert time.monotonic() - since < 200
    texts = [(tmp_path / f"{i}.log").read_text() for i in range(2)]
    assert any("checkpoints/3 cannot be read" in text for text in texts), texts


@pytest.mark.parametrize(("nodes", "gpus"), [(2, ["all", "all"]), (1, ["0", "1"])])
def test_single_slurm_task_has_all_devices(tmp_path, nodes, gpus):
    step = {"JOB_ID": 12, "STEP_NODELIST": "localhost", "NTASKS": 2, "STEP_NUM_NODES": nodes}
    tasks = [step | {"PROCID": i, "LOCALID": i % (2 // nodes)} for i in range(2)]
    variables = [{f"SLURM_{name}": str(value) for name, value in task.items()} for task in tasks]
    port = {"JAX_COORDINATOR_PORT": free_address().rpartition(":")[2]}
    commands = children("devices", tmp_path, count=2, address="auto")
    with started(commands, tmp_path, [port | own for own in variables]) as processes:
        assert [process.wait() for process in processes] == [0, 0]
    for i in range(2):
        assert f"{i} of 2 has the GPUs: {gpus[i]}" in (tmp_path / f"{i}.log").read_text()


REWARD = """
import itertools, pathlib, time

held = pathlib.Path(__file__).with_name("held")
calls = itertools.count()

def vowels(completion, example):
    after = next(calls) >= 32  # of a process, in its first two steps
    while after and held.exists():
        time.sleep(0.02)
    return sum(c in "aeiou" + example["answer"] for c in completion) / 8
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    return directory


def keys(material: Path, run_dir: Path) -> dict[str, str]:
    own = {
        "run_dir": run_dir,
        "data.template": "text",
        "reward.path": f"{material}/reward.py:vowels",
        "train.steps": STEPS,
        "train.microbatch_tokens": 16,
        "train.updates_per_rollout": 4,
        "train.max_kl": 1e-4,  # passed at each second mini-batch: all processes stop alike
        "checkpoint.every": 100,
        "mesh.data": 2,
        "mesh.fsdp": 2,
    }
    return run_keys(material, **own)


def commands(material: Path, run_dir: Path, *, count: int) -> list[list[str]]:
    return of_processes("train", keys(material, run_dir), count=count)


def of_processes(command: str, keys: dict[str, str], *, count: int) -> list[list[str]]:
    address, made = free_address(), []
    for i in range(count):
        every = dict(keys)
        if count > 1:
            every |= {"hosts.coordinator": address}
            every |= {"hosts.processes": str(count), "hosts.process": str(i)}
        made.append(["jaxrl", command])
        made[-1] += [part for key, value in every.items() for part in (f"--{key}", value)]
    return made


def finish(material: Path, run_dir: Path) -> None:
    with started(commands(material, run_dir, count=1), run_dir.parent) as (process,):
        assert process.wait() == 0, (run_dir.parent / "0.log").read_text()
    assert "model:" in (run_dir.parent / "0.log").read_text()


def test_process_count_may_change_on_resume(material, tmp_path):
    run_dir, held = tmp_path / "run", material / "held"
    held.touch()  # else a run may be done before it is stopped
    with started(commands(material, run_dir, count=2), tmp_path) as processes:
        while not read_metrics(run_dir / "metrics.jsonl"):
            assert processes[0].poll() is None, (tmp_path / "0.log").read_text()
            time.sleep(0.01)
        processes[1].send_signal(signal.SIGTERM)  # to one of them
        held.unlink()
        assert [process.wait() for process in processes] == [128 + signal.SIGTERM] * 2
    stopped = read_metrics(run_dir / "metrics.jsonl")[-1]["step"]
    assert 0 < stopped < STEPS
    assert f"ended by signal 15 at step {stopped}" in (tmp_path / "0.log").read_text()
    assert "ended by" not in (tmp_path / "1.log").read_text()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(stopped)]

    held.touch()
    every_step = ["--checkpoint.every", "1"]
    four = [[*command, *every_step] for command in commands(material, run_dir, count=4)]
    with started(four, tmp_path) as processes:
        while not (run_dir / "checkpoints" / str(stopped + 1)).exists():
            assert processes[0].poll() is None, (tmp_path / "0.log").read_text()
            time.sleep(0.01)
        processes[3].kill()
        held.unlink()
        since = time.monotonic()
        for process in processes[:3]:
            assert process.wait() != 0
        assert time.monotonic() - since < 200
    assert len(read_metrics(run_dir / "metrics.jsonl")) < STEPS
    said = (tmp_path / "0.log").read_text()  # jax's words, or ours if a collective failed first
    assert "another task died" in said or "jaxrl: process 0 of 4 failed" in said

    finish(material, run_dir)  # what several processes saved, one reads
    one = tmp_path / "one"
    finish(material, one)
    assert_equal_runs(run_dir, one, model=material / "model")


def assert_equal_runs(run_dir: Path, one: Path, *, model: Path) -> None:
    """Of several processes and of one: every step once, and the same parameters."""
    rows, whole = (read_metrics(run / "metrics.jsonl") for run in (run_dir, one))
    for got, wanted in zip(rows, whole, strict=True):
        assert got.keys() == wanted.keys()
        assert got.get("update/left_out", 2) == 2  # another test's runs have no bound
        for name in ("reward", "grad_norm", "completion_length"):
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5)
    # Sums over processes are in another order than those within one.
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (run_dir, one))
    moved = load_file(model / "model.safetensors")
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-5, err_msg=name)
    assert max(np.abs(theirs[name] - moved[name]).max() for name in theirs) > 1e-2


def test_dpo_adapters_resume_in_one_process(tmp_path):
    """Process 0 alone reads the pairs; the other one's file does not exist."""
    tiny.write_checkpoint(tmp_path / "model")
    rows = [
        {"prompt": f"{a}{b}", "chosen": f"a{b}", "rejected": f"b{a}"} for a in "cde" for b in "cde"
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def keys(name: str, **changes: str) -> dict[str, str]:
        every = {
            "run_dir": str(tmp_path / name),
            "precision": "fp32",
            "model.path": str(tmp_path / "model"),
            "data.path": str(tmp_path / "pairs.jsonl"),
            "data.eval_path": str(tmp_path / "pairs.jsonl"),
            "data.template": "text",
            "loss.beta": "0.5",
            "lora.rank": "2",
            "train.steps": "4",
            "train.batch_size": "4",
            "train.row_length": "16",
            "train.microbatch_tokens": "16",
            "optimizer.learning_rate": "0.01",
            "mesh.data": "4",
            "mesh.fsdp": "2",
        }
        return every | changes

    def finish(name: str) -> dict[str, np.ndarray]:
        argv = [f"--{key}={value}" for key, value in keys(name).items()]
        assert main(["dpo", *argv]) == 0
        tensors = {
            f"{part}/{key}": array
            for part in ("model", "adapter")
            for file in (tmp_path / name / part).glob("*.safetensors")
            for key, array in load_file(file).items()
        }
        assert len(tensors) > len(load_file(tmp_path / "model" / "model.safetensors"))
        return tensors

    some = {"train.steps": "2", "mesh.data": "2", "eval.every": "1"}
    half = of_processes("dpo", keys("two", **some), count=2)
    half[1][half[1].index("--data.path") + 1] = "nowhere.jsonl"
    with started(half, tmp_path) as processes:
        assert [process.wait() for process in processes] == [0, 0], [
            (tmp_path / f"{i}.log").read_text() for i in range(2)
        ]
    assert "held-out pairs ranked correctly" in (tmp_path / "0.log").read_text()
    assert "held-out" not in (tmp_path / "1.log").read_text()
    found, wanted = finish("two"), finish("one")
    steps = {row["step"] for row in read_metrics(tmp_path / "two" / "metrics.jsonl")}
    assert steps == {0, 1, 2, 4}  # it went on after the second
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)
    for part, options in (("model", []), ("adapter", ["--adapter"])):
        assert (
            main(["export", str(tmp_path / "two"), str(tmp_path / f"exported_{part}"), *options])
            == 0
        )
        (file,) = (tmp_path / f"exported_{part}").glob("*.safetensors")
        for name, array in load_file(file).items():
            assert (array == found[f"{part}/{name}"]).all()
    assert max(np.abs(array).max() for key, array in wanted.items() if "lora_B" in key) > 1e-2
