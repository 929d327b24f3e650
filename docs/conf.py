"""How the documentation is built: strictly, and without the network."""

from __future__ import annotations

from typing import Any

from pygments.lexers.special import TextLexer

from moored import __version__

project = "Moored"
author = "The Moored authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
html_theme = "furo"
html_title = f"Moored {version}"
html_static_path: list[str] = []


def setup(app: Any) -> None:
    """Mermaid is drawn by the pages that show these files; here its source is shown as it is."""
    app.add_lexer("mermaid", TextLexer)
