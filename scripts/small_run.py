"""A run of seconds for loops that disturb runs, and the comparison of two such runs.

The model is untrained and tiny. The run has all state that a checkpoint must hold: moments, two
updates per rollout, dynamic sampling that leaves rollouts over, held-out accuracy, logged samples.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import make_arithmetic
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.tracking.tracker import read_metrics

_REWARD = """
def digits(completion, example):
    return sum(c.isdigit() for c in completion) // 3 / 3
"""
# Beginnings of metrics that differ between equal runs.
_TIMED = ("time", "tokens_per_second", "sampler/servers", "sampler/versions_behind", "fleet/")


def write_material(directory: Path, **sizes: int) -> None:
    """Writes the model, prompts and a reward; `sizes` are other than the tiny model's."""
    make_arithmetic.write_model(directory / "model", make_arithmetic.TINY | sizes, seed=0)
    numbers = {"sft": 1, "train": 64, "held_out": 8}
    make_arithmetic.write_texts(directory, numbers, rng=random.Random(0))
    (directory / "reward.py").write_text(_REWARD)


def report(run_dir: Path, different: Sequence[str], *, killed: Counter[str], finished: int) -> None:
    """Prints how a disturbed run compares with the undisturbed one."""
    outcome = f"DIFFERENT: {', '.join(different)}" if different else "the same, bit for bit"
    print(
        f"{killed.total()} kills {dict(killed)}, {finished} runs: {run_dir} is {outcome}",
        flush=True,
    )


def overrides(material: Path, run_dir: Path, *, steps: int) -> Mapping[str, str]:
    """Returns the keys of the run."""
    return {
        "precision": "fp32",
        "run_dir": str(run_dir),
        "model.path": str(material / "model"),
        "data.path": str(material / "train.jsonl"),
        "data.eval_path": str(material / "held_out.jsonl"),
        "data.max_prompt_tokens": "12",
        "reward.path": f"{material / 'reward.py'}:digits",
        "sampling.max_tokens": "8",
        "train.steps": str(steps),
        "train.train_batch": "4",
        "train.group_size": "4",
        "train.dynamic_sampling_rounds": "2",
        "train.updates_per_rollout": "2",
        "train.microbatch_tokens": "256",
        "optimizer.learning_rate": "1e-3",
        "checkpoint.every": "1",
        "eval.every": "5",
        "probe.every": "0",
        "samples.every": "2",
    }


def command(
    material: Path, run_dir: Path, *, steps: int, further: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the command that starts the run or resumes it, with further keys."""
    keys = {**overrides(material, run_dir, steps=steps), **(further or {})}
    options = [f"--{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "jaxrl.cli", "train", *options]


def differences(run_dir: Path, undisturbed: Path) -> list[str]:
    """Returns the files of a finished run that must equal another run's and do not."""
    read_by = {
        "config.toml": _config,
        "metrics.jsonl": _metrics,
        "samples.jsonl": Path.read_bytes,
        "model": _folder,
        "checkpoints": _last_checkpoint,
    }
    return [
        name for name, read in read_by.items() if read(run_dir / name) != read(undisturbed / name)
    ]


def kept(run_dir: Path) -> list[str]:
    """Lists the directory of checkpoints: steps and left-overs."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def _config(path: Path) -> dict[str, Any]:
    found = toml_file.flatten(toml_file.load(Config, file=path))
    # The directory is in the address of the store of weights, and each start has its own addresses.
    own = ("run_dir", "sampler.store", "hosts.coordinator", "sampler.url")
    return {key: value for key, value in found.items() if key not in own}


def _metrics(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if not name.startswith(_TIMED)}
        for entry in read_metrics(path)
    ]


def _folder(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _leaves(reader: ocp.StandardCheckpointer, directory: Path) -> Any:
    """Returns the shapes and dtypes of a checkpoint's arrays."""
    return reader.metadata(directory).item_metadata.tree


def _last_checkpoint(directory: Path) -> tuple[dict[str, bytes], Any]:
    """Returns (the bytes of its arrays, its host state, which holds their digests)."""
    steps = [path.name for path in directory.iterdir() if path.name.isdigit()]
    last = (directory / max(steps, key=int)).resolve()  # orbax reads no relative path
    with ocp.StandardCheckpointer() as reader:
        # As numpy arrays: the run may have had several processes, and this is one.
        held = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), _leaves(reader, last / "state"))
        state = reader.restore(last / "state", held)
    arrays = {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree.leaves_with_path(state)
    }
    return arrays, json.loads((last / "host" / "metadata").read_bytes())
