"""The config of a small run, of which a test states only what is special to it."""

from pathlib import Path
from typing import Any

from jaxrl.config import toml_file
from jaxrl.config.training import Config


def run_keys(directory: Path | str, **changes: Any) -> dict[str, str]:
    """Returns the keys of a run whose model, prompts and run directory lie in `directory`.

    A change is written `train__steps=3`, or `**{"train.steps": 3}`.
    """
    keys = {
        "precision": "fp32",
        "run_dir": Path(directory, "run"),
        "model.path": Path(directory, "model"),
        "data.path": Path(directory, "prompts.jsonl"),
        "data.max_prompt_tokens": 8,
        "reward.path": "exact_match",
        "sampling.max_tokens": 8,
        "train.steps": 2,
        "train.train_batch": 4,
        "train.group_size": 4,
        "train.microbatch_tokens": 64,
        "optimizer.learning_rate": 0.01,
        "probe.every": 0,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: str(value) for name, value in keys.items()}


def run_config(directory: Path | str, **changes: Any) -> Config:
    """Returns the config of such a run."""
    return toml_file.load(Config, overrides=list(run_keys(directory, **changes).items()))


def run_arguments(directory: Path | str, **changes: Any) -> list[str]:
    """Returns the keys of such a run as arguments of `jaxrl`."""
    return [f"--{name}={value}" for name, value in run_keys(directory, **changes).items()]
