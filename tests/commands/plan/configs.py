"""Configs for the tests of `jaxrl plan`."""

import json

from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.huggingface.config import convert
from tests import tiny


def make_config(directory, **changes) -> Config:
    """Builds the config of a run whose tiny model is only a config.json."""
    content = convert.to_hf_config(tiny.CONFIG, dtype="float32")
    (directory / "config.json").write_text(json.dumps(content))
    keys = {
        "model.path": str(directory),
        "data.path": "d",
        "data.max_prompt_tokens": "16",
        "reward.path": "exact_match",
        "sampling.max_tokens": "16",
        "train.train_batch": "8",
        "train.group_size": "4",
        "train.microbatch_tokens": "64",
        "mesh.fsdp": "4",
        "mesh.tensor": "2",
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return toml_file.load(Config, overrides=list(keys.items()))
