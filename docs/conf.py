"""How Sphinx makes a site of this directory: `make docs`. Nothing is fetched while it is built or read."""

from importlib.metadata import version as installed

project = "wald"
author = "the authors of wald"
version = release = installed("wald")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
highlight_language = "text"

myst_heading_anchors = 4  # a link to a heading is checked, and has the form that hosts of repositories give it

smartquotes = False  # an option in prose is --jsonl, with two hyphens

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True  # with --fail-on-warning: a reference to a name of wald that is in no page fails
# The names of other libraries, the modules behind the public ones, and type variables.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!wald\b).*|wald\.(format|files|segments|retention|reading|payloads|session)\..*|wald\.aio\.T$")
]

html_theme = "furo"
html_title = "wald"
html_copy_source = False
html_show_copyright = False
