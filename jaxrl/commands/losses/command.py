"""Lists the recipes for [loss] name = ...
with their formulas and parameters.

  jaxrl losses grpo gspo"""

import argparse
import itertools
import textwrap
from collections.abc import Iterable, Sequence

from jaxrl.commands import options
from jaxrl.commands.losses import catalogue
from jaxrl.commands.losses.catalogue import Entry, Parameter


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("losses", __doc__)
    made.add_argument("name", nargs="*", help="recipes to show (default: all)")
    made.add_argument("--markdown", action="store_true", help="print the tables of the docs")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments = parser().parse_args(argv)
    entries = catalogue.list_recipes()
    known = {entry.name: entry for entry in entries}
    for name in arguments.name:
        if name not in known:
            raise ValueError(f"unknown recipe {name!r}; available: {', '.join(known)}")
    shown = [known[name] for name in arguments.name] or entries
    print(markdown(shown) if arguments.markdown else text(shown), end="")
    return 0


def text(entries: Sequence[Entry]) -> str:
    """Formats recipes for a terminal, followed by the shared keys and the named parts."""
    blocks = [
        [
            entry.name,
            *_wrapped(entry.summary, indent=4),
            *(f"      {line}" for line in entry.formula),
            *_parameters(entry.parameters),
        ]
        for entry in entries
    ]
    blocks.append(["every recipe", *_parameters(catalogue.list_terms())])
    for kind, parts in catalogue.list_parts().items():
        lines = ([f"    {part.name}", *_wrapped(part.summary, indent=8)] for part in parts)
        blocks.append([kind, *itertools.chain(*lines)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def markdown(entries: Sequence[Entry]) -> str:
    """Formats the tables of docs/reference/recipes.md."""
    recipes = [
        (
            f"`{entry.name}`",
            "<br>".join(f"`{line}`" if _is_formula(line) else line for line in entry.formula),
            ", ".join(
                f"`{p.name}`" if p.default is None else f"`{p.name} = {p.default}`"
                for p in entry.parameters
            ),
            " ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in entry.papers),
        )
        for entry in entries
    ]
    terms = [(f"`{p.name}`", f"`{p.default}`", p.meaning) for p in catalogue.list_terms()]
    advantages = [(f"`{entry.name}`", entry.summary) for entry in catalogue.list_estimators()]
    parts = [
        (kind, f"`{part.name}`", part.summary)
        for kind, entries in catalogue.list_parts().items()
        for part in entries
    ]
    return "\n".join(
        [
            *_table(("recipe", "loss and advantage", "parameters", "paper"), recipes),
            "\nKeys shared by every recipe:\n",
            *_table(("key", "default", "meaning"), terms),
            "\nAdvantage estimators, for `loss.advantage`:\n",
            *_table(("estimator", "definition"), advantages),
            "\nNames of parts: a Ratio for `ratio` and `kl_ratio`, a Level for `level`, Weights "
            "for `correction` and `rejection` (several: `token_tis + veto`), an Aggregation for "
            "`aggregation`, a KLEstimator for `kl_estimator`, a Divergence for `divergence`.\n",
            *_table(("kind", "name", "definition"), parts),
            "",
        ]
    )


def _is_formula(line: str) -> bool:
    return any(sign in line for sign in "=-(")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]


def _parameters(parameters: Sequence[Parameter]) -> list[str]:
    lines = []
    for p in parameters:
        lines.append(f"    {p.name}" + ("" if p.default is None else f" = {p.default}"))
        lines += _wrapped(f"{p.meaning[:1].upper()}{p.meaning[1:]}", indent=8)
    return lines


def _wrapped(text: str, *, indent: int) -> list[str]:
    return [" " * indent + line for line in textwrap.wrap(text, 96 - indent)]
