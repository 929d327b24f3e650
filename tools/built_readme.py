"""The README as the built packages show it: without links that only work in a checkout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface  # type: ignore[import-not-found]
except ImportError:  # in the tests: it is installed only where the package is built
    MetadataHookInterface = object

__all__ = ["BuiltReadme", "outside_of_checkout"]

_LINK = re.compile(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]*)\)")


def outside_of_checkout(text: str, home: str | None) -> str:
    """Make relative links absolute; without a home of the project, only their words remain."""

    def absolute(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        if home is None:
            return "" if image else words
        return f"{image}[{words}]({home.rstrip('/')}/{'raw' if image else 'blob'}/main/{path})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(absolute, text))


class BuiltReadme(MetadataHookInterface):  # type: ignore[misc]
    """Set the README of the metadata; the home is `[project.urls] Source`, if there is one."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        text = (Path(self.root) / "README.md").read_text()
        home = metadata.get("urls", {}).get("Source")
        content = outside_of_checkout(text, home)
        metadata["readme"] = {"content-type": "text/markdown", "text": content}
