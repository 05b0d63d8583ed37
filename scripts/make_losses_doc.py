"""Writes the tables of docs/losses.md from the code.

python scripts/make_losses_doc.py
"""

from pathlib import Path

from jaxrl.commands.losses import catalogue
from jaxrl.commands.losses.command import markdown

DOCUMENT = Path(__file__).parents[1] / "docs" / "losses.md"
BEGIN, END = "<!-- table: jaxrl losses --markdown -->\n", "<!-- end of table -->\n"


def updated(text: str) -> str:
    """The document with the tables as the code has them."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + markdown(catalogue.list_recipes()) + END + tail


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
