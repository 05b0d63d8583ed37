"""Settings of the site: `sphinx-build docs build/site`."""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]  # jaxrl of this checkout, and `extension`

project = "jaxrl"
author = "the authors of jaxrl"
version = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "extension",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
highlight_language = "text"
copybutton_exclude = ".linenos, .gp, .go"  # copies the commands of a session, not their output

html_theme = "furo"
html_title = "jaxrl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_search_summary = False  # a page opened from disk may not fetch the text of another
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["torch", "vllm"]
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
default_role = "py:obj"  # `name` in a docstring is code, and a link where the name is documented
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    (
        "py:class",
        r"(jax|flax|numpy|optax|collections|concurrent|pathlib|decimal|fractions|inspect|matplotlib"
        r"|types)\..*",
    ),
    ("py:class", r"jaxrl\..*\.(E|R|Rows|T|Term|Tree|checkpoints\.State)"),  # type variables
    ("py:class", r"jaxrl\.\w+\.\w+\.(\w+Fn|From\w+)"),  # functions, which tables describe
    ("py:class", r"jaxrl\.bridge\.store\.version\.StoredFile"),  # internal
    ("py:class", r"starlette\..*"),
    ("py:class", r"jaxrl\.environments\.gateway\.dialect\.(Dialect|Call)"),  # internal
    ("py:class", r"jaxrl\.sampling\.vllm\.(in_process\.Engine|tpu_engine\.Ended)"),  # internal
]
