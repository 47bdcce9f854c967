"""How Sphinx makes a site of this directory: `make docs`. Nothing is fetched while it is built or read."""

from __future__ import annotations

import re
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "wald"
author = "the authors of wald"
version = release = installed("wald")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
highlight_language = "text"

myst_heading_anchors = 4  # a link to a heading is checked, and has the form that hosts of repositories give it

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True  # with --fail-on-warning: a reference to a name of wald that is in no page fails
# The names of other libraries, and the modules behind the public ones.
nitpick_ignore_regex = [(r"py:.*", r"(?!wald\b).*|wald\.(format|store|payloads|session)\..*")]

html_theme = "furo"
html_title = "wald"
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", fences_to_directives, priority=400)  # before napoleon


def fences_to_directives(*given: Any) -> None:
    """Examples in docstrings are fenced, as in the pages; Sphinx reads docstrings as reStructuredText."""
    lines: list[str] = given[-1]
    fence = re.compile(r"^( *)```(\w+)\n(.*?)\n\1```$", re.DOTALL | re.MULTILINE)
    lines[:] = fence.sub(_directive, "\n".join(lines)).split("\n")


def _directive(fenced: re.Match[str]) -> str:
    indent, language, code = fenced.groups()
    inside = re.sub(r"^(?=.)", "    ", code, flags=re.MULTILINE)
    return f"{indent}.. code-block:: {language}\n\n{inside}\n"
