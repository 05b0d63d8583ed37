"""Law 8: a run that is killed at any moment and resumed gives the same parameters, bit for bit."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxrl import huggingface
from jaxrl.commands.export.checkpoint import export_checkpoint
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core.precision import PRESETS
from jaxrl.learner.checkpoints import Checkpoints
from jaxrl.learner.optimizers import make_schedule
from tests import tiny
from tests.processes import XLA_FLAGS, ModuleProcess
from tests.run_config import run_arguments

STEPS = 24
LETTERS = [chr(ord("!") + i) for i in range(61)]  # with three special tokens the tiny vocabulary


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model, prompts and a reward."""
    directory = tmp_path_factory.mktemp("material")
    dtype = PRESETS["fp32"].params
    huggingface.save(directory / "model", tiny.params(), tiny.CONFIG, dtype=dtype)
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<end>", "<unk>", *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "model" / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<end>",
        "unk_token": "<unk>",
    }
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(described))
    rng = random.Random(0)
    prompts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(50)]
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "answer": p[0]}) + "\n" for p in prompts)
    )
    (directory / "reward.py").write_text(
        "import pathlib, time\n"
        "held = pathlib.Path(__file__).with_name('held')\n"
        "def capitals(completion, example):\n"
        "    while waits():\n"
        "        time.sleep(0.01)\n"
        "    found = example['answer'] in completion\n"
        "    return (sum(c.isupper() for c in completion) + found) // 3 / 3\n"
        "def waits():\n"
        "    try:\n"
        "        step, metrics = held.read_text().split()\n"
        "        return f'\"step\": {step},' in pathlib.Path(metrics).read_text()\n"
        "    except FileNotFoundError:\n"
        "        return False\n"
    )
    return directory


@contextmanager
def started(material: Path, run_dir: Path) -> Iterator[ModuleProcess]:
    """`jaxrl train` with everything that a checkpoint must hold: moments, a loss scale that moves,
    a critic's head on the policy's trunk, several updates per rollout, a position in the data,
    answers that were left over, the best accuracy."""
    own = {
        "data.eval_path": material / "prompts.jsonl",
        "data.eval_limit": 4,
        "reward.path": f'["{material}/reward.py:capitals"]',
        "train.steps": STEPS,
        "train.train_batch": 3,
        "train.dynamic_sampling_rounds": 2,
        "loss.name": "ppo",
        "critic.trunk": "shared",
        "critic.pretrain_steps": 2,
        "critic.learning_rate": 1e-2,
        "train.updates_per_rollout": 2,
        "optimizer.schedule": "cosine",
        "precision": "fp16_master,loss_scale=dynamic:65536:5",
        "checkpoint.every": 3,
        "eval.every": 8,
        "run_dir": run_dir,
    }
    environment = os.environ | {"XLA_FLAGS": XLA_FLAGS}  # one device
    arguments = ["train", *run_arguments(material, **own)]
    log = run_dir.parent / f"{run_dir.name}.log"
    process = ModuleProcess("jaxrl", arguments, output=log, environment=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log_of(run_dir: Path) -> str:
    return (run_dir.parent / f"{run_dir.name}.log").read_text()


def finish(material: Path, run_dir: Path) -> None:
    with started(material, run_dir) as process:
        assert process.wait() == 0, log_of(run_dir)


def rows(run_dir: Path) -> list[dict]:
    """Complete lines of the metrics."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(process: ModuleProcess, run_dir: Path, *, step: int) -> None:
    while process.poll() is None and max((r["step"] for r in rows(run_dir)), default=-1) < step:
        time.sleep(0.01)
    assert process.poll() is None, log_of(run_dir)


def final_state(run_dir: Path, item: str = "state") -> dict:
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(run_dir / "checkpoints" / str(STEPS) / item)


def numbers(run_dir: Path) -> list[dict]:
    """What was logged at each step, without times."""
    timed = ("time", "tokens_per_second")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in rows(run_dir)]


@pytest.fixture(scope="module")
def undisturbed(material, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(material, run_dir)
    return run_dir


def assert_same_run(a: Path, b: Path) -> None:
    x, y = ([final_state(run, item) for item in ("state", "critic")] for run in (a, b))
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for (path, u), v in zip(jax.tree.leaves_with_path(x), jax.tree.leaves(y), strict=True):
        assert np.asarray(u).tobytes() == np.asarray(v).tobytes(), jax.tree_util.keystr(path)
    assert numbers(a) == numbers(b)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (a / "model" / name).read_bytes() == (b / "model" / name).read_bytes()


def test_undisturbed_run_moves_the_loss_scale(undisturbed):
    before = np.asarray(tiny.params()["layers"]["q"])
    assert np.abs(final_state(undisturbed)["params"]["layers"]["q"] - before).max() > 1e-2
    assert np.abs(final_state(undisturbed, "critic")["params"]["score"]).max() > 1e-2
    assert len({row["loss_scale"] for row in rows(undisturbed) if "loss_scale" in row}) > 2
    assert sum(row.get("groups/kept", 0) > 0 for row in rows(undisturbed)) > STEPS // 4


def test_logged_learning_rate_is_the_applied_one(undisturbed):
    """The optimizer does not count skipped steps, so neither does its schedule. It spans the steps
    after those of the critic alone."""
    total = 2 * (STEPS - 2)
    schedule = make_schedule("cosine", learning_rate=1e-2, warmup_steps=0, total_steps=total)
    learnt = [row for row in rows(undisturbed) if "skipped_steps" in row]
    skipped = [int(row["skipped_steps"]) for row in learnt]
    assert skipped[-2] > 0
    for i, row in enumerate(learnt):
        taken = 2 * i - ([0, *skipped][i])
        assert row["learning_rate"] == pytest.approx(float(schedule(taken)), rel=1e-6)


def test_critic_head_is_not_exported(undisturbed, tmp_path):
    config = toml_file.load(Config, file=undisturbed / "config.toml")
    export_checkpoint(config, run_dir=undisturbed, directory=tmp_path, step="latest", dtype=None)
    for directory in (tmp_path, undisturbed / "model"):
        huggingface.load(directory, dtype=None)  # refuses a tensor that no language model has
    names = [directory / "model.safetensors" for directory in (tmp_path, undisturbed / "model")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_killed_and_resumed_equals_undisturbed(material, undisturbed, tmp_path):
    run_dir, held = tmp_path / "run", material / "held"
    rng = random.Random(time.time_ns())
    for step in sorted(rng.sample(range(STEPS - 8), 2)):
        # It gets no further while this process is late.
        held.write_text(f"{step + 4} {run_dir}/metrics.jsonl")
        with started(material, run_dir) as process:
            wait_for_step(process, run_dir, step=step)
            time.sleep(rng.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
    # And once it is asked to end.
    held.write_text(f"{STEPS - 2} {run_dir}/metrics.jsonl")
    with started(material, run_dir) as process:
        wait_for_step(process, run_dir, step=STEPS - 6)
        process.send_signal(signal.SIGTERM)
        held.unlink()
        assert process.wait() == 128 + signal.SIGTERM, log_of(run_dir)
    assert "ended by signal 15 at step" in log_of(run_dir)
    assert "Traceback" not in log_of(run_dir)
    checkpoints = Checkpoints.reading(run_dir / "checkpoints")
    assert checkpoints.latest_step() == rows(run_dir)[-1]["step"] < STEPS
    checkpoints.close()
    assert all(path.name.isdigit() for path in (run_dir / "checkpoints").iterdir())
    finish(material, run_dir)
    assert_same_run(run_dir, undisturbed)
