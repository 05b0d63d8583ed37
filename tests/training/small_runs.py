"""Small runs of each command that trains, on files that a test may edit."""

import json
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import StandardCheckpointer

from jaxrl import train
from jaxrl.config.preference import DPOConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.toml_file import load
from jaxrl.training.supervised.dpo import train_dpo
from jaxrl.training.supervised.sft import finetune
from tests import tiny
from tests.run_config import run_config

REWARD = """
def early_letters(completion, example):
    return sum(c in "abcdefghijklm" for c in completion) / 8 + (example["answer"] in completion)
"""


def write_material(directory: Path) -> Path:
    """Writes a model, a teacher, prompts, texts, pairs and a reward."""
    tiny.write_checkpoint(directory / "model")
    tiny.write_checkpoint(directory / "teacher")
    rows = [{"prompt": f"{i}+{i}=", "answer": str(i % 10)} for i in range(10)]
    write_rows(directory / "prompts.jsonl", rows)
    write_rows(directory / "held_out.jsonl", rows[:4])
    write_rows(directory / "texts.jsonl", [{**r, "completion": r["answer"]} for r in rows])
    chosen = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "x"} for r in rows]
    write_rows(directory / "pairs.jsonl", chosen)
    (directory / "reward.py").write_text(REWARD)
    return directory


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(directory: Path, run_dir: Path, *, fork: str | None = None, **changes) -> train.Result:
    """Trains a policy; by default 2 steps of 3 prompts."""
    own = {
        "run_dir": run_dir,
        "data.eval_path": directory / "held_out.jsonl",
        "data.max_prompt_tokens": 24,
        "reward.path": f"{directory}/reward.py:early_letters",
        "train.train_batch": 3,
        "train.microbatch_tokens": 128,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
    }
    return train.train(run_config(directory, **own | changes), fork=fork)


def supervised(directory: Path, run_dir: Path, *, fork: str | None = None, **changes):
    """Trains on texts, or with the key `loss.name` on pairs; by default 2 steps of 3 rows."""
    pairs = "loss.name" in changes
    keys = {
        "model.path": directory / "model",
        "data.path": directory / ("pairs.jsonl" if pairs else "texts.jsonl"),
        "run_dir": run_dir,
        "precision": "fp32",
        "train.steps": 2,
        "train.batch_size": 3,
        "train.row_length": 48,
        "train.microbatch_tokens": 96,
        "optimizer.learning_rate": 0.01,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
    }
    keys = [(key, str(value)) for key, value in (keys | changes).items()]
    if pairs:
        return train_dpo(load(DPOConfig, overrides=keys), fork=fork)
    return finetune(load(SFTConfig, overrides=keys), fork=fork)


def state(run_dir: Path, step: int) -> list[bytes]:
    """The arrays of a checkpoint, bit for bit."""
    with StandardCheckpointer() as reader:
        found = reader.restore(run_dir / "checkpoints" / str(step) / "state")
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]


def host(run_dir: Path, step: int) -> dict:
    """What a checkpoint holds besides arrays."""
    path = run_dir / "checkpoints" / str(step) / "host" / "metadata"
    return json.loads(path.read_text())["host"]
