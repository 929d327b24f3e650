"""Moored: the connection layer for Python services."""

__version__ = "0.1.0"

__all__ = ["__version__"]
