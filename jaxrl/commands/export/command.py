"""`jaxrl export`: writes a checkpoint as a Hugging Face model, or its adapters."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxrl.config import toml_file
from jaxrl.config.training import Config

DESCRIPTION = """Writes the policy of a checkpoint of `jaxrl train` as a Hugging Face model with its
adapters merged into it, or the adapters alone.

  jaxrl export runs/latest models/mine --step best
  jaxrl export runs/latest adapters/mine --adapter"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = argparse.ArgumentParser(
        prog="jaxrl export",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run_dir", type=Path, help="directory of the training run")
    made.add_argument("directory", type=Path, help="where the model is written")
    made.add_argument("--step", default="latest", help="latest, best or a number (default: latest)")
    made.add_argument(
        "--adapter", action="store_true", help="write the adapters of lora.rank alone, as PEFT does"
    )
    made.add_argument(
        "--dtype",
        help="f32, bf16 or f16 (default: the run's wire dtype; of adapters, that of its params)",
    )
    arguments = made.parse_args(argv)
    config = toml_file.load(Config, file=arguments.run_dir / "config.toml")

    from jaxrl.commands.export.checkpoint import (
        export_adapters,
        export_checkpoint,  # after --help: it takes seconds
    )

    export = export_adapters if arguments.adapter else export_checkpoint
    step = export(
        config,
        run_dir=arguments.run_dir,
        directory=arguments.directory,
        step=arguments.step,
        dtype=arguments.dtype,
    )
    print(f"step {step}: {arguments.directory}")
    return 0
