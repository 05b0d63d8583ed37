"""`jaxrl config`: prints a resolved config."""

from collections.abc import Sequence

from jaxrl import parts
from jaxrl.commands import options
from jaxrl.config import toml_file
from jaxrl.config.sft import SFTConfig
from jaxrl.config.training import Config

DESCRIPTION = """Prints the config of `jaxrl train`, or with --sft of `jaxrl sft`, with every key.

  jaxrl config configs/quickstart.toml --train.steps 50 > mine.toml"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    schema = SFTConfig if "--sft" in argv else Config
    made = options.parser_with_file("config", schema, description=DESCRIPTION)
    made.add_argument("--sft", action="store_true", help="the keys of `jaxrl sft`")
    config = options.parse(made, schema, argv).config
    if isinstance(config, Config):
        parts.make_recipe(config)  # what is wrong with the loss is said here, too
    print(toml_file.dumps(config), end="")
    return 0
