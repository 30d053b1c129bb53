"""The docs as a site: `make docs`. Needs Sphinx and MyST, neither torch nor this package."""

import re

from sphinx.application import Sphinx

project = "modular_kernel"
author = "The modular_kernel authors"
root_doc = "index"
extensions = ["myst_parser"]
exclude_patterns: list[str] = []

# Headings can be linked to, as on GitHub.
myst_heading_anchors = 3
myst_links_external_new_tab = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Compose fused mixture-of-experts layers from parts.",
    "page_width": "1240px",
    "body_max_width": "none",
    "sidebar_width": "230px",
    "font_size": "15px",
    "code_font_size": "0.85em",
    "fixed_sidebar": True,
}
html_title = project
html_static_path = ["_static"]  # alabaster reads custom.css there
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:notebook|examples)/[^)#]+)\)")


def link_outside(app: Sphinx, name: str, source: list[str]) -> None:
    """Make links to files outside of the site downloads."""
    source[0] = _OUTSIDE.sub(r"{download}`\1 <\2>`", source[0])


def setup(app: Sphinx) -> None:
    """Register what this site adds to Sphinx."""
    app.connect("source-read", link_outside)
