"""Configs for the tests of `jaxrl plan`."""

import json

from jaxrl.config.training import Config
from jaxrl.huggingface.config import convert
from tests import tiny
from tests.run_config import run_config


def make_config(directory, **changes) -> Config:
    """Builds the config of a run whose tiny model is only a config.json."""
    content = convert.to_hf_config(tiny.CONFIG, dtype="float32")
    (directory / "config.json").write_text(json.dumps(content))
    own = {
        "model.path": directory,
        "data.max_prompt_tokens": 16,
        "sampling.max_tokens": 16,
        "train.train_batch": 8,
        "mesh.fsdp": 4,
        "mesh.tensor": 2,
        "precision": "bf16_master",
        "probe.every": 10,
    }
    return run_config(directory, **own | changes)
