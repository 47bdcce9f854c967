"""How Sphinx makes a site of this directory: `make docs`. Nothing is fetched while it is built or read."""

from importlib.metadata import version as installed

project = "wald"
author = "the authors of wald"
version = release = installed("wald")

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
highlight_language = "text"

myst_heading_anchors = 4  # a link to a heading is checked, and has the form that hosts of repositories give it

smartquotes = False  # an option in prose is --jsonl, with two hyphens

html_theme = "furo"
html_title = "wald"
html_copy_source = False
html_show_copyright = False
