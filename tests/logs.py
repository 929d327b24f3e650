"""A log that says nothing for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silent"]


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Only what is critical is logged: thousands of failures on purpose are many lines.

    By `setLevel()`, which forgets what the loggers below have decided before: one that keeps
    "not enabled" would stay mute for the tests that come after.
    """
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
