"""Configs of all commands that train."""

from pathlib import Path

from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.toml_file import read_tree, validate
from jaxrl.config.training import Config

AnyConfig = Config | SFTConfig | DPOConfig | RewardModelConfig


def load_any(file: Path) -> AnyConfig:
    """Reads the config.toml of a run, whose keys tell the command that trained; raises as
    `toml_file.load`."""
    tree = read_tree(file)
    marks = {("data", "completion_key"): SFTConfig, ("loss", "center_rewards"): RewardModelConfig}
    marks |= {("data", "chosen_key"): DPOConfig}
    for (table, key), schema in marks.items():
        if isinstance(tree.get(table), dict) and key in tree[table]:
            return validate(schema, tree)
    return validate(Config, tree)
