"""What a consumer sees: transactions in the order of their commits, and resets, never silence."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from ._changes import Change, Emitted, Truncate
from ._lsn import Lsn
from ._position import History, Position
from ._rows import Relation
from ._transaction import Committed

if TYPE_CHECKING:
    from ._hub import Hub

__all__ = ["Changes", "Reset", "Transaction", "Visit"]

log = logging.getLogger("moored.postgres")

#: After so many transactions and changes that were at hand, the loop gets a turn.
YIELD_EVERY = 2000


class Reset(NamedTuple):
    """History is not what it was: what was consumed so far may be of another past.

    The database was restored from a backup, or is another one, or has lost the slot. Take a new
    copy of the tables; the transactions that follow belong to the new history. Asking for the next
    one says that this one was understood.
    """

    reason: str


class Visit:
    """A consumer's time under its name: what it is given then, it may acknowledge.

    It ends when a reset comes, or when the name is dropped or comes back: not when the consumer is
    closed. A transaction knows this and not its `Changes`, so that somebody who keeps one does not
    keep the other: a loop that has failed is over, whatever is left of it.
    """

    __slots__ = ("hub", "name")

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub = hub
        self.name = name


class Transaction:
    """A committed transaction; `ack()` says that its effect is safe."""

    __slots__ = ("_committed", "_history", "_length", "_tables", "_visit", "acknowledged")

    def __init__(
        self,
        committed: Committed,
        visit: Visit,
        tables: frozenset[int] | None,
        history: History,
    ) -> None:
        self._committed = committed
        # They stay what they are, whatever becomes of the stream while somebody works on it.
        self._visit = visit
        self._tables = tables
        self._history = history
        self._length: int | None = None
        #: Whether its acknowledgement has counted.
        self.acknowledged = False

    @property
    def xid(self) -> int:
        """Its number in PostgreSQL; 0 for a message outside of any transaction."""
        return self._committed.xid

    @property
    def commit_lsn(self) -> Lsn:
        """Where its commit is in the log."""
        return Lsn(self._committed.commit_lsn)

    @property
    def commit_time(self) -> datetime:
        """When it was committed, by the server's clock."""
        return self._committed.commit_time

    @property
    def origin(self) -> str | None:
        """The server that it came from, if it came by replication."""
        return self._committed.origin

    @property
    def position(self) -> Position:
        """Where it ends: keep it with the effect, and pass it as `start=` later."""
        return Position(self._history, Lsn(self._committed.end_lsn))

    def __iter__(self) -> Iterator[Change | Truncate | Emitted]:
        """Its changes, in the order in which they were made."""
        if self._tables is None:
            return self._committed.__iter__()
        return self._chosen(self._tables)

    def _chosen(self, tables: frozenset[int]) -> Iterator[Change | Truncate | Emitted]:
        for change in self._committed:
            if isinstance(change, Emitted) or change.relation.oid in tables:
                yield change

    def __len__(self) -> int:
        """How many changes the loop over it gives."""
        if self._length is None:
            self._length = self._committed.count(self._tables)
        return self._length

    def __bool__(self) -> bool:
        return True  # also without a change: it was committed, and wants to be acknowledged

    async def ack(self) -> None:
        """Its effect is safe: PostgreSQL may forget it. In any order, and harmless twice.

        It counts, too, when the consumer was closed meanwhile. After a reset, or when the consumer
        has come back and is given it again, it changes nothing: `acknowledged` stays False.
        """
        if not self.acknowledged:
            visit = self._visit
            self.acknowledged = visit.hub.acknowledge(visit, self._committed.end_lsn)
            if not self.acknowledged:
                log.debug("an acknowledgement of %r by %r came too late", self, visit.name)

    def __repr__(self) -> str:
        return f"<Transaction {self.xid} at {self.commit_lsn}: {len(self)} changes>"


class Changes:
    """The transactions of one consumer: `async for txn in changes`.

    It ends when it is closed, or when its manager is. To leave the loop is to pause: what was not
    acknowledged comes again when the consumer comes back under its name.

    Several tasks may share one: each transaction comes to one of them, to whoever waits longest.
    """

    def __init__(self, hub: Hub, name: str, tables: tuple[str, ...]) -> None:
        self._hub = hub
        self.name = name
        #: The tables that it wants; none for all that are published.
        self.tables = tables
        self._queue: deque[Transaction | Reset] = deque()
        self._bytes = 0
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._last: Reset | None = None
        self._error: BaseException | None = None
        self._closed = False
        #: Another one after each reset.
        self._visit = Visit(hub, name)
        # The tables that were known when it was last looked which of them it wants, with those.
        self._known: Mapping[int, Relation] | None = None
        self._wanted: frozenset[int] = frozenset()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Transaction | Reset:
        """The next transaction, or a `Reset`."""
        if (last := self._last) is not None:
            await self._hub.understood(self, last)
            if self._last is last:  # another task may have got another one meanwhile
                self._last = None
        queue = self._queue
        while not queue:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            await self._wait()
        if self._taken > YIELD_EVERY:
            # A consumer that awaits nothing else must leave the reader, and its answers, a turn.
            self._taken = 0
            await asyncio.sleep(0)
            if not queue:
                return await self.__anext__()
        item = queue.popleft()
        if type(item) is Transaction:
            body = item._committed.body
            self._taken += 1 + body.count
            self._bytes -= body.size
            if self._hub.full:
                self._hub.made_room()
        else:
            assert isinstance(item, Reset)
            self._last = item
        return item

    async def _wait(self) -> None:
        """Wait until there may be something."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                self._wake()  # what it was woken for is for the next one
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
            raise

    async def aclose(self) -> None:
        """Pause: nothing more comes."""
        self._end(None)
        self._hub.detach(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # -- for the hub ---------------------------------------------------------------------------

    def _put(self, item: Transaction | Reset) -> None:
        self._queue.append(item)
        if type(item) is Transaction:
            self._bytes += item._committed.body.size
        if self._waiting:
            self._wake()

    def _forget(self) -> None:
        """What was queued belongs to a stream that is over."""
        self._queue.clear()
        self._bytes = 0
        self._hub.made_room()

    def _begin_anew(self, reason: str) -> None:
        """History is not what it was: that comes next, and nothing from before it."""
        self._forget()
        self._visit = Visit(self._hub, self.name)
        self._put(Reset(reason))

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        self._error = error
        self._forget()
        while self._waiting:
            self._wake()

    def _wake(self) -> None:
        """Wake the one that has waited longest."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self._hub.detach(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._queue)} queued"
        return f"<Changes of {self.name!r}: {state}>"
