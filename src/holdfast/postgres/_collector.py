"""The seam where received transactions become safe.

By default the slot is the log: what no consumer has acknowledged stays in the server. A durable
local log can take that place later: it does the same four things, and says that a transaction is
safe when it is on its own disk.
"""

from __future__ import annotations

from typing import Protocol

from ._transaction import Committed

__all__ = ["LogCollector"]


class LogCollector(Protocol):
    """Takes transactions in commit order, and says how far the server may forget."""

    def apply(self, committed: Committed) -> None:
        """One more transaction; one that was applied before comes again after a reconnect."""

    def flushed(self) -> int:
        """Everything before this place is safe."""

    async def reset(self, reason: str) -> None:
        """History is not what it was: forget everything, and tell whoever relied on it."""

    async def checkpoint(self, told: int) -> None:
        """The server will be told that everything before this place is safe: keep that first."""
