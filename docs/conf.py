"""How the documentation is built: strictly, and without the network."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from pygments.lexers.special import TextLexer
from sphinx.util.docutils import SphinxDirective

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


class Metrics(SphinxDirective):
    """The table of all metrics of a collector, from its code."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        lines = ["| metric | type | labels | |", "|---|---|---|---|"]
        for metric in getattr(import_module(module), name)().describe():
            full = metric.name + ("_total" if metric.type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            lines.append(f"| `{full}` | {metric.type} | {labels} | {metric.documentation} |")
        content = nodes.container()
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, content)
        return content.children


def setup(app: Any) -> None:
    """Mermaid is drawn by the pages that show these files; here its source is shown as it is."""
    app.add_lexer("mermaid", TextLexer)
    app.add_directive("metrics", Metrics)
