"""`--help` of commands with config keys: an overview of one screen, and tables by their names."""

import argparse
import itertools
import re
from typing import Any

from jaxrl.config.toml_file import one_line
from jaxrl.core import nearest

NO_TABLE = "keys"  # title of the keys outside of all tables
_ALL = "all"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds `--help`, `--help TABLE ...` and `--help all` to a parser made without help.

    The parser's argument groups titled `[name]`, or `keys`, are its tables of config keys.
    """
    parser.add_argument(
        "-h",
        "--help",
        nargs="*",
        metavar="TABLE",
        action=_Help,
        help=f"show this page, the keys of tables, or {_ALL!r} keys",
    )


class _Help(argparse.Action):
    """Prints help on the parser, one of its tables or all tables, and exits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        tables: dict[str, Any] = {
            group.title.strip("[]"): group
            for group in parser._action_groups
            if group.title == NO_TABLE or group.title.startswith("[")
        }
        if not values:
            print(_overview(parser, tables), end="")
            parser.exit()
        for name in values:
            if name not in (_ALL, *tables):
                near = nearest(name, tables)
                hint = f"did you mean {near}?" if near else f"expected one of {', '.join(tables)}"
                parser.error(f"--help {name}: unknown table of keys; {hint}")
        shown = tables.values() if _ALL in values else [tables[name] for name in values]
        print(_with_sections(parser._get_formatter(), shown), end="")
        parser.exit()


def _overview(parser: Any, tables: dict[str, Any]) -> str:
    if [*tables] == [NO_TABLE]:
        return parser.format_help()
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    own = [group for group in parser._action_groups if group not in tables.values()]
    formatter.start_section("options")
    for group in own:
        formatter.add_arguments(group._group_actions)
    formatter.end_section()
    text, width = formatter.format_help(), max(map(len, tables))
    rows = itertools.groupby(tables, key=lambda name: _summary(name, tables[name]))
    lines = [f"  {'  '.join(names):{width}}  {summary}" for summary, names in rows]
    example = next(name for name in tables if name != NO_TABLE)
    return (
        f"{text}\ntables of keys; --help {example} shows the keys of [{example}], --help {_ALL} "
        "all keys:\n" + "\n".join(lines) + "\n"
    )


def _summary(name: str, group: Any) -> str:
    if name == NO_TABLE:
        return "Outside of the tables: " + ", ".join(a.dest for a in group._group_actions) + "."
    return re.split(r"[.;](?: |$)", one_line(group.description))[0] + "."


def _with_sections(formatter: Any, groups: Any) -> str:
    for group in groups:
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    return formatter.format_help()
