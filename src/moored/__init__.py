"""Moored: the connection layer for Python services."""

from __future__ import annotations

from ._version import __version__

# Without importing typing, which takes longer than all the rest of this import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .app import App as App

__all__ = ["App", "__version__"]


def __getattr__(name: str) -> object:
    # Imported when it is first used: it needs the packages of `moored[service]`.
    if name == "App":
        from .app import App

        return App
    raise AttributeError(f"module 'moored' has no attribute {name!r}")
