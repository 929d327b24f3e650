"""The interface of the receiver of transactions, which decides when they are safe.

By default this is the `Hub`: the slot is the log, and the server keeps every transaction that some
consumer has not acknowledged. A durable local log can replace it; for it, a transaction is safe
when it is on the local disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .._position import History
from ..decode import Committed
from ..server import Findings

__all__ = ["LogCollector"]


class LogCollector(Protocol):
    """Receives transactions in commit order, and decides up to which LSN the server may discard.

    For each connection, the calls are `reload`, `reset` if necessary, `check_starts`, `begin`, and
    then transactions, all from one event loop. A call that raises ends the connection; the next
    connection starts at the last confirmed LSN.
    """

    #: Whether the slot existed although no state was stored.
    adopted: bool

    # -- before the stream -------------------------------------------------------------------------

    async def reload(self) -> None:
        """Read the stored state: another process may have had the lock meanwhile."""

    async def reset(self, reason: str) -> None:
        """Reset all consumers: the server's history is not the known one."""

    def check_starts(self, history: History, found: Findings) -> None:
        """Reset the consumers whose chosen start position does not exist on this server."""

    # -- the stream --------------------------------------------------------------------------------

    def begin(self, history: History, confirmed: int) -> None:
        """Start a stream: all transactions that end after this LSN follow, some of them again."""

    def apply_all(self, done: Sequence[Committed]) -> None:
        """Take transactions; after a reconnection, some of them for the second time."""

    def check_tables(self) -> object:
        """Have the tables checked: the stream has reported a change of the schema."""

    def passed(self, end: int) -> None:
        """Advance to this LSN: everything before it was sent, and is safe."""

    @property
    def full(self) -> bool:
        """Whether reading must pause until `room` returns."""

    async def room(self) -> None:
        """Wait until reading may continue."""

    # -- confirmation ------------------------------------------------------------------------------

    def flushed(self) -> int:
        """Return the LSN before which everything is safe; called after each `apply_all`."""

    async def checkpoint(self, end: int) -> None:
        """Store the positions before this LSN is confirmed to the server.

        Also called with the LSN of the last call, while some positions increase and others do not.
        """
