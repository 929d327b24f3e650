"""Silence a logger in a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silent"]


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Log only critical records: a simulation logs thousands of expected failures.

    `setLevel()` also clears what the child loggers cache: a child that has cached "not enabled"
    would stay silent in later tests.
    """
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
