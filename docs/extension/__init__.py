"""The parts of the site that are made from the code: names, config keys and commands."""

from sphinx.application import Sphinx

from extension import commands, config_keys, public_names

PAGES = {"reference/config": config_keys.text, "reference/commands": commands.text}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to a build."""
    app.connect("source-read", _write)
    app.connect("autodoc-skip-member", public_names.skip_field)
    before_napoleon = 400
    app.connect("autodoc-process-docstring", public_names.write_docstring, before_napoleon)
    return {"parallel_read_safe": True}


def _write(app: Sphinx, page: str, source: list[str]) -> None:
    if page in PAGES:
        source[0] += PAGES[page]()
    elif page.startswith("reference/"):
        source[0] = public_names.expand(source[0])
