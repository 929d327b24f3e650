"""Warnings about connections that are in use for too long."""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Any

from moored.kernel import duration

from ._core import Core
from ._item import holder_name

__all__ = ["warn_of_leaks"]

log = logging.getLogger("moored.reservoir")


def warn_of_leaks(
    core: Core[Any], lock: threading.Lock, after: float, now: float, name: str
) -> None:
    """Log the holder of each connection in use for `after` seconds; once for each checkout."""
    with lock:
        leaks = [
            item for item in core.in_use() if now - item.since >= after and not item.leak_reported
        ]
        for item in leaks:
            item.leak_reported = True
    for item in leaks:
        log.warning(
            "%s: a connection has been in use for %s (leak_after=%g s): %s, at:\n%s",
            name,
            duration(now - item.since),
            after,
            holder_name(item.holder),
            "".join(traceback.format_list(item.stack)) if item.stack else "  (unknown)",
        )
