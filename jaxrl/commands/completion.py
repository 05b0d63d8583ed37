"""Prints a script that completes commands, options and config keys
with the Tab key.

  echo 'source <(jaxrl completion bash)' >> ~/.bashrc
  jaxrl completion zsh > ~/.zfunc/_jaxrl"""

import argparse
from collections.abc import Sequence

import shtab

from jaxrl.commands import COMMANDS, load_command, options


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("completion", __doc__)
    made.add_argument("shell", choices=("bash", "zsh"))
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    shell = parser().parse_args(argv).shell
    whole = argparse.ArgumentParser("jaxrl", add_help=False)
    commands = whole.add_subparsers()
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, parents=[load_command(name).parser()], add_help=False)
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest.endswith("path") or not (action.option_strings or action.choices):
                action.complete = shtab.FILE  # pyrefly: ignore[missing-attribute] for shtab
    print(shtab.complete(whole, shell))
    return 0
