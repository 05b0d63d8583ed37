"""The reference of the `jaxrl` commands."""

import argparse
import textwrap

from extension.parsers import own_options, parser, tables
from jaxrl.commands import COMMANDS


def text() -> str:
    """Formats every command with its own arguments as Markdown."""
    return "\n\n".join(_command(name) for name in COMMANDS)


def _command(name: str) -> str:
    made = parser(name)
    found = [table.name for table in tables(made)]
    parts = [f"## jaxrl {name}", _usage(made), _paragraphs(made.description or "")]
    parts += [_argument(action) for action in own_options(made)]
    if found:
        parts += ["It accepts [config keys](config.md) as options, such as `--precision fp32`."]
    return "\n\n".join(parts)


def _usage(made: argparse.ArgumentParser) -> str:
    usage = " ".join(made.format_usage().removeprefix("usage: ").replace("[-h] ", "").split())
    return f"```text\n{usage}\n```"


def _paragraphs(description: str) -> str:
    """Formats indented paragraphs, which are commands, as blocks."""
    return "\n\n".join(
        f"```bash\n{textwrap.dedent(part)}\n```" if part.startswith("  ") else part
        for part in description.split("\n\n")
    )


def _argument(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or action.metavar or action.dest
    value = f" {action.metavar or action.dest.upper()}" if _takes_value(action) else ""
    default = action.default if action.default not in (None, False, argparse.SUPPRESS) else None
    text = (action.help or "").replace("%(default)s", str(default)).replace("%%", "%")
    return f"`{names}{value}`\n: {text or 'see above'}"


def _takes_value(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.nargs != 0
