"""The seam where received transactions become safe.

By default the slot is the log: what no consumer has acknowledged stays in the server. A durable
local log can take that place: it does the same things, and says that a transaction is safe when it
is on its own disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .._position import History
from ..decode import Committed
from ..server import Findings

__all__ = ["LogCollector"]


class LogCollector(Protocol):
    """Takes transactions in commit order, and says how far the server may forget.

    For each connection: `reload`, perhaps `reset`, `check_starts`, then `begin`, and from there on
    transactions. All calls come from one event loop. What raises ends the connection, and the next
    one begins where the server was last told.
    """

    #: Whether the slot was there before anything was kept here.
    adopted: bool

    # -- before the stream: is what was kept still true? -------------------------------------------

    def reload(self) -> None:
        """Read what was kept: another process may have had the lock meanwhile."""

    async def reset(self, reason: str) -> None:
        """History is not what it was: forget everything, and tell whoever relied on it."""

    def check_starts(self, history: History, found: Findings) -> None:
        """This is what the server has: tell those who rely on something that it has not."""

    # -- the stream --------------------------------------------------------------------------------

    def begin(self, history: History, confirmed: int) -> None:
        """A stream begins: everything that ends after this place comes, once more or at last."""

    def apply_all(self, done: Sequence[Committed]) -> None:
        """Some more transactions; those that were applied before come again after a reconnect."""

    def passed(self, end: int) -> None:
        """Everything was safe, and up to this place there is nothing more for anybody."""

    @property
    def full(self) -> bool:
        """Whether to stop reading for a while; `room` ends that."""

    async def room(self) -> None:
        """Wait until it can take more."""

    # -- what the server is told -------------------------------------------------------------------

    def flushed(self) -> int:
        """Everything before this place is safe; it is asked after each `apply_all`."""

    async def checkpoint(self, told: int) -> None:
        """The server will be told that everything before this place is safe: keep that first."""
