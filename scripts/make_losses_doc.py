"""Writes the tables of docs/reference/recipes.md from the code.

python scripts/make_losses_doc.py
"""

from pathlib import Path

from experiments.runs import write_table

from jaxrl.commands.losses import catalogue
from jaxrl.commands.losses.command import markdown

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "recipes.md"

if __name__ == "__main__":
    write_table(DOCUMENT, "jaxrl losses --markdown", markdown(catalogue.list_recipes()))
