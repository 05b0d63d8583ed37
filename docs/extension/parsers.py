"""The parser of each `jaxrl` command, and the config keys among its options."""

import argparse
from typing import NamedTuple

from jaxrl.commands import load_command


class Key(NamedTuple):
    """A config key as `--help` shows it."""

    name: str
    type: str
    default: str
    text: str


class Table(NamedTuple):
    """A table of a config; the keys outside all tables have the name ""."""

    name: str
    text: str
    keys: list[Key]


def parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command."""
    return load_command(command).parser()


def tables(made: argparse.ArgumentParser) -> list[Table]:
    """Returns the tables of config keys of a command; none for a command without a config."""
    return [
        Table(
            (group.title or "").strip("[]") if group.title != "keys" else "",
            group.description or "",
            [_key(action) for action in group._group_actions],
        )
        for group in made._action_groups
        if group.title == "keys" or (group.title or "").startswith("[")
    ]


def own_options(made: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the arguments of a command that are not config keys, without --help."""
    keys = {key.name for table in tables(made) for key in table.keys}
    return [action for action in made._actions if action.dest not in keys and action.dest != "help"]


def _key(action: argparse.Action) -> Key:
    text, _, default = (action.help or "").replace("%%", "%").rpartition(" (")
    return Key(action.dest, str(action.metavar), default[:-1].removeprefix("default: "), text)
