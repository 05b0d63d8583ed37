"""Writes the model of a checkpoint as a Hugging Face model: of `jaxrl train`, `sft`,
`dpo` or `reward-model`. LoRA adapters are merged into it, or written alone with --adapter.

  jaxrl export runs/latest models/mine --step best
  jaxrl export runs/latest models/mine-int8 --blocks int8
  jaxrl export runs/latest adapters/mine --adapter"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from jaxrl.commands import options
from jaxrl.commands.paths import config_of
from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.supervised import SFTConfig, SupervisedConfig
from jaxrl.config.toml_file import read_tree, validate
from jaxrl.config.training import Config


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("export", __doc__)
    made.add_argument("run_dir", help="directory of the training run, or its address in a bucket")
    made.add_argument("directory", type=Path, help="where to write the model")
    made.add_argument("--step", default="latest", help="latest, best or a number (default: latest)")
    made.add_argument(
        "--overwrite", action="store_true", help="replace a model that is in the directory"
    )
    made.add_argument(
        "--adapter", action="store_true", help="write only the LoRA adapters, in PEFT's format"
    )
    made.add_argument(
        "--dtype", help="f32, bf16 or f16 (default: as the run itself writes its model at the end)"
    )
    made.add_argument(
        "--blocks",
        default="none",
        choices=("none", "e4m3", "int8"),
        help="write the layers' matrices in 8 bits, for vLLM: as `blocks` of precision (default: "
        "none)",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments = parser().parse_args(argv)
    directory = arguments.directory
    if not arguments.overwrite and any(directory.glob("*.safetensors")):
        raise ValueError(f"{directory} holds a model; add --overwrite, or name another directory")

    from jaxrl.commands.export.checkpoint import export_checkpoint  # takes seconds, so after --help
    from jaxrl.training.copies import copy_of, one_checkpoint

    step = arguments.step
    run = copy_of(
        arguments.run_dir, kind=f"step-{step}", want=functools.partial(one_checkpoint, step)
    )
    config = _load(config_of(run))
    step = export_checkpoint(
        config,
        run_dir=run,
        directory=directory,
        step=step,
        dtype=arguments.dtype,
        blocks=arguments.blocks,
        only_adapters=arguments.adapter,
    )
    print(f"step {step}: {directory}")
    return 0


def _load(file: Path) -> Config | SupervisedConfig:
    """Reads a run's config.toml, by the command that trained; raises as `toml_file.load`."""
    tree = read_tree(file)
    marks = {("data", "completion_key"): SFTConfig, ("loss", "center_rewards"): RewardModelConfig}
    marks |= {("data", "chosen_key"): DPOConfig}
    for (table, key), schema in marks.items():
        if isinstance(tree.get(table), dict) and key in tree[table]:
            return validate(schema, tree)
    return validate(Config, tree)
