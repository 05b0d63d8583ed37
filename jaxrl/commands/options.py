"""Command-line parsers built from config schemas: each key is an option --section.key VALUE."""

import argparse
import inspect
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic.fields import FieldInfo

from jaxrl.commands import key_help
from jaxrl.commands.paths import check_paths, find_beside
from jaxrl.config import toml_file
from jaxrl.config.section import Section
from jaxrl.core import Precision

C = TypeVar("C", bound=Section)


class Parsed(NamedTuple, typing.Generic[C]):
    """A config, and the command's own arguments."""

    config: C
    arguments: argparse.Namespace


def parser_with_file(
    name: str, schema: type[Section], *, description: str | None
) -> argparse.ArgumentParser:
    """Builds the parser of `jaxrl NAME [FILE] [--section.key VALUE ...]`."""
    made = parser(name, schema, description=description, usage="[FILE]")
    made.add_argument("file", nargs="?", metavar="FILE", help="a TOML file that sets any keys")
    return made


def trainer(
    name: str, schema: type[Section], *, description: str | None
) -> argparse.ArgumentParser:
    """Builds the parser of a command that trains, as `parser_with_file`."""
    made = parser_with_file(name, schema, description=description)
    made.add_argument(
        "--fork",
        metavar="RUN[@STEP]",
        help="start a new run from a checkpoint of RUN, by default the newest",
    )
    made.add_argument(
        "--verbose", action="store_true", help="show how the run was set up, and XLA's own log"
    )
    return made


def parser(
    command: str, schema: type[Section], *, description: str | None, usage: str
) -> argparse.ArgumentParser:
    """Builds a parser with an option for every key; `usage` names the positional arguments."""
    made = plain_parser(
        command, description, usage=f"{usage} [--section.key VALUE ...]", add_help=False
    )
    key_help.add_to(made)
    groups: dict[str, Any] = {}
    for name, field in toml_file.keys(schema).items():
        section = name.rpartition(".")[0]
        if section not in groups:
            table = schema.model_fields[section].annotation if section else None
            text = inspect.getdoc(table) if isinstance(table, type) else None
            title = f"[{section}]" if section else key_help.NO_TABLE
            groups[section] = made.add_argument_group(title, text)
        groups[section].add_argument(
            f"--{name}",
            dest=name,
            metavar=_type_name(field.annotation),
            default=argparse.SUPPRESS,
            help=_help(field),
        )
    return made


def plain_parser(
    name: str, description: str | None, *, usage: str | None = None, add_help: bool = True
) -> argparse.ArgumentParser:
    """Builds the parser of a command without config keys."""
    return argparse.ArgumentParser(
        prog=f"jaxrl {name}",
        usage=usage and f"jaxrl {name} {usage}",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=add_help,
    )


def output(text: str) -> Path:
    """Reads an option's name of a file to write and makes its directory, before a command computes
    for hours what it cannot write.

    Raises:
      argparse.ArgumentTypeError: for a directory, a file that may not be written, or a place where
        none can be made.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory; name a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}: {error.filename}") from None
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: no permission to write {place}")
    return path


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Names an option's value once, as Python 3.13 does: `-h, --help [TABLE ...]`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def parse_arguments(
    made: argparse.ArgumentParser, schema: type[C], argv: Sequence[str]
) -> Parsed[C]:
    """Loads the config file, if any, and overrides it with keys from the command line. Inputs that
    the file names, and that are not there, are looked for in its folder.

    Raises:
      ConfigError: see `toml_file.load` and `check_paths`.
    """
    more, rest = _free_keys(made, schema, argv)
    arguments = made.parse_args(rest)
    names = toml_file.keys(schema)
    given = [(name, text) for name, text in vars(arguments).items() if name in names]
    file = getattr(arguments, "file", None)
    tree = {} if file is None else find_beside(toml_file.read_tree(file), Path(file).parent)
    config = toml_file.override(schema, tree, [*given, *more])
    check_paths(config)
    own = {k: v for k, v in vars(arguments).items() if k not in names and k != "file"}
    return Parsed(config, argparse.Namespace(**own))


def _free_keys(
    made: argparse.ArgumentParser, schema: type[Section], argv: Sequence[str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Extracts keys unknown to argparse, a custom loss's parameters, and completes a table in place
    of its key `name` (--sampler vllm). With = the hyphens may be left out: train.steps=50."""
    known = made._option_string_actions
    names = toml_file.keys(schema)
    tables = toml_file.open_tables(schema)
    beginnings = {*names, *(name.rpartition(".")[0] for name in names)} - {""}
    found, rest, tokens = [], [], iter(argv)
    for token in tokens:
        option, equals, value = token.partition("=")
        if equals and beginnings & {option, f"{option}.name", option.rpartition(".")[0]}:
            token, option = f"--{token}", f"--{option}"
        if not option.startswith("--") or option == "--" or option in known:
            rest.append(token)
            continue
        name = option[2:]
        whole = f"{name}.name" in names
        if whole:
            name = f"{name}.name"
        elif name.rpartition(".")[0] not in tables:
            raise toml_file.ConfigError(toml_file.unknown_key(schema, name))
        text = value if equals else next(tokens, None)
        if text is None:
            raise toml_file.ConfigError(f"{name}: the value is missing")
        if whole:  # argparse keeps the last of several
            rest.append(f"--{name}={text}")
        else:
            found.append((name, text))
    return found, rest


def _help(field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"default: {_shown(field.default)}"
    return f"{toml_file.one_line(field.description)} ({default})".replace("%", "%%")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(_shown, value)) or "empty"
    if isinstance(value, Precision):
        return value.text
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(annotation: Any) -> str:
    """Formats a type: int | None as INT, Literal["a", "b"] as {a,b}, tuple[str, ...] as STR,..."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict:
        return "TABLE"
    if origin is typing.Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is tuple:
        return ",".join("..." if a is Ellipsis else _type_name(a) for a in arguments)
    if origin is not None:
        return "|".join(_type_name(a) for a in arguments if a is not type(None))
    return "STR" if annotation is Precision else annotation.__name__.upper()
