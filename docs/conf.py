"""Sphinx configuration of the documentation, which `make docs` builds."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "modular_kernel"
author = "The modular_kernel authors"
root_doc = "index"
sys.path.insert(0, str(Path(__file__).parent))

from publish import version_of_checkout  # noqa: E402 (in this folder)

version = release = version_of_checkout()
extensions = ["myst_parser", "api_directive", "sphinx.ext.viewcode", "sphinx.ext.intersphinx"]
nitpicky = True  # a reference without a target is a warning, and warnings are errors
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
viewcode_follow_imported_members = False  # following them would import the package
viewcode_line_numbers = True
# Inventories are text files of this repository, so that a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
}
exclude_patterns: list[str] = []
pygments_style, pygments_dark_style = "friendly", "github-dark"

# Headings can be linked to, as on GitHub.
myst_heading_anchors = 3
myst_links_external_new_tab = False

# Keep quotes and hyphens as typed, because "bf16" and --prepared are also copied from prose.
smartquotes = False

html_theme = "furo"  # light or dark, depending on the reader's system
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"font-stack": "system-ui, sans-serif"},
}
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_js_files = ["site.js"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar-version.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

_OUTSIDE = re.compile(r"\[([^\[\]]+)\]\(((?:\.\./)+(?:notebook|examples)/[^)#]+)\)")


def link_outside(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn links to files outside of the site into downloads."""
    source[0] = _OUTSIDE.sub(r"{download}`\1 <\2>`", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_outside)
