"""Sphinx configuration; `make docs` builds the site."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs._tools import docstrings
from shared import __version__

project = "DisTrans"
author = "the DisTrans authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
highlight_language = "none"

# The anchors that GitHub gives to headings, so that links work in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "member-order": "bysource",
    "exclude-members": "model_config, __init__, __new__",
}
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"DisTrans {version}"
html_copy_source = False
html_show_copyright = False
html_static_path: list[str] = []


def setup(app: Any) -> None:
    """Connect what Sphinx calls while it builds."""
    app.connect("autodoc-process-docstring", docstrings.process)
