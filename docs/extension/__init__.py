"""The parts of the site that are made from the code: names, config keys and commands."""

import re

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

from extension import commands, config_keys, public_names

PAGES = {"reference/config": config_keys.text, "reference/commands": commands.text}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to a build."""
    app.connect("source-read", _write)
    app.connect("autodoc-skip-member", public_names.skip_field)
    app.connect("autodoc-process-signature", public_names.hide_signature)
    app.connect("viewcode-follow-imported", public_names.find_home)
    before_napoleon = 400
    app.connect("autodoc-process-docstring", public_names.write_docstring, before_napoleon)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as in the docstrings
    return {"parallel_read_safe": True}


def _write(app: Sphinx, page: str, source: list[str]) -> None:
    # A link's text is a file name on GitHub; on the site it becomes the page's name.
    source[0] = re.sub(r"\[(\w+)\.md\]\(", lambda m: f"[{m[1].replace('_', ' ')}](", source[0])
    if page in PAGES:
        source[0] += PAGES[page]()
    elif page.startswith("reference/"):
        source[0] = public_names.expand(source[0])
