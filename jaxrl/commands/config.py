"""Prints the complete config of `jaxrl train`,
or of `jaxrl sft` with --sft.

  jaxrl config configs/quickstart.toml --train.steps 50 > mine.toml"""

import argparse
from collections.abc import Sequence

from jaxrl.builders.environment import load_environment
from jaxrl.builders.recipe import make_recipe
from jaxrl.commands import options
from jaxrl.config import toml_file
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.training import Config
from jaxrl.environments import load_rewards, load_tools


def parser(schema: type[Config | SFTConfig] = Config) -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser_with_file("config", schema, description=__doc__)
    made.add_argument("--sft", action="store_true", help="print the config of `jaxrl sft`")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    schema = SFTConfig if "--sft" in argv else Config
    config = options.parse_arguments(parser(schema), schema, argv).config
    if isinstance(config, Config):
        _check_functions(config)
    print(toml_file.dumps(config), end="")
    return 0


def _check_functions(config: Config) -> None:
    """Loads the functions that a config names, and reports all errors together."""
    environment, reward, found = config.environment, config.reward, list[str]()
    for check in (
        lambda: make_recipe(config),
        lambda: load_rewards(reward.path, reward.function_weights, timeout=reward.timeout),
        lambda: load_tools(environment.tools),
        lambda: load_environment(environment),
    ):
        try:
            check()
        except ValueError as error:
            found.append(str(error))
    if found:
        raise toml_file.ConfigError("\n".join(found))
