"""The interface of a consumer: transactions in commit order, and resets."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Generic, NamedTuple, Never, Self, cast

from .._lsn import Lsn
from .._position import History, Position
from ..decode import Change, Committed, Emitted, Relation, Truncate
from ._schema_changes import SchemaChanged
from ._tables import Followed, parse_table

if sys.version_info >= (3, 13):
    from typing import TypeVar
else:
    from typing_extensions import TypeVar  # a dependency of psycopg

if TYPE_CHECKING:
    from ._hub import Hub

__all__ = ["Attachment", "Changes", "Reset", "Transaction"]

log = logging.getLogger("moored.postgres")

#: What is delivered besides transactions and resets: with `schema_changes=True`, `SchemaChanged`.
Extra = TypeVar("Extra", covariant=True, default=Never)

#: After so many transactions and changes without a wait, iteration yields to the event loop.
YIELD_EVERY = 2000
#: The same for the changes of one transaction that is iterated asynchronously.
PAUSE_EVERY = 200


class Reset(NamedTuple):
    """Changes were missed, or the server's history is not the one that was consumed so far.

    The database was restored from a backup or replaced, or has lost the slot; or a table was
    dropped and created again, renamed, removed from the publication, or rewritten by ALTER TABLE.
    Take a new copy of the tables: they are published again, and every change after the copy
    follows. The reset counts as handled when the next item is requested, unless the consumer was
    closed before.
    """

    reason: str
    #: Which reset it is: two of one consumer may have the same reason.
    number: int = 0


@dataclass(slots=True, eq=False)
class Attachment:
    """The validity of a consumer's acknowledgements.

    It ends with a reset, when the consumer is dropped, or when it attaches again; not when it is
    closed. A transaction refers to this and not to its `Changes`, so that a transaction that is
    still referenced does not keep an abandoned `Changes` attached.
    """

    hub: Hub
    name: str


@dataclass(slots=True, eq=False, repr=False)
class Transaction:
    """A committed transaction; call `ack()` once its effect is durable."""

    _committed: Committed
    # Fixed at delivery: the stream may change while the consumer works on the transaction.
    _attachment: Attachment
    _tables: frozenset[int] | None
    _history: History
    #: Whether it was acknowledged, and the acknowledgement was valid.
    acknowledged: bool = False

    @property
    def xid(self) -> int:
        """The transaction ID; 0 for a message outside of any transaction."""
        return self._committed.xid

    @property
    def commit_lsn(self) -> Lsn:
        """The LSN of the commit record."""
        return Lsn(self._committed.commit_lsn)

    @property
    def commit_time(self) -> datetime:
        """The commit time, by the server's clock."""
        return self._committed.commit_time

    @property
    def origin(self) -> str | None:
        """The name of the replication origin, or None if it was committed by a client."""
        return self._committed.origin

    @property
    def position(self) -> Position:
        """The end of the transaction: store it with the effect, and pass it as `start=` later."""
        return Position(self._history, Lsn(self._committed.end_lsn))

    def __iter__(self) -> Iterator[Change | Truncate | Emitted]:
        """Yield the changes in the order in which they were made."""
        return self._chosen(self._all())

    async def __aiter__(self) -> AsyncIterator[Change | Truncate | Emitted]:
        """Yield the changes; other tasks run in between, which matters if there are many."""
        tables = self._tables
        for looked_at, change in enumerate(self._all(), 1):
            if tables is None or isinstance(change, Emitted) or change.relation.oid in tables:
                yield change
            if not looked_at % PAUSE_EVERY:  # also those of other tables take time
                await asyncio.sleep(0)

    def _all(self) -> Iterator[Change | Truncate | Emitted]:
        """Return its changes, and perhaps those of tables that are not followed."""
        return iter(self._committed)

    def _chosen(
        self, changes: Iterable[Change | Truncate | Emitted]
    ) -> Iterator[Change | Truncate | Emitted]:
        """Return those of the followed tables."""
        tables = self._tables
        if tables is None:
            return iter(changes)
        return (
            change
            for change in changes
            if isinstance(change, Emitted) or change.relation.oid in tables
        )

    def __len__(self) -> int:
        """Return the number of changes that iteration yields."""
        return self._committed.count(self._tables)

    def __bool__(self) -> bool:
        return True  # also without changes, although len() is 0: it must be acknowledged

    async def ack(self) -> None:
        """Acknowledge the transaction: the server need not keep it for this consumer any longer.

        Transactions may be acknowledged in any order, and also after the consumer was closed; a
        second call has no effect. After a reset, or when a consumer of the same name has attached
        again and receives the transaction again, it is not valid: `acknowledged` stays False.
        """
        if not self.acknowledged:
            attachment = self._attachment
            self.acknowledged = attachment.hub.acknowledge(attachment, self._committed.end_lsn)
            if not self.acknowledged:
                log.debug("an acknowledgement of %r by %r came too late", self, attachment.name)

    def __repr__(self) -> str:
        return f"<Transaction {self.xid} at {self.commit_lsn}: {len(self)} changes>"


class Changes(Generic[Extra]):
    """The transactions of one consumer: `async for txn in changes`.

    Iteration ends when this object or its `Postgres` is closed. Leaving the loop pauses the
    consumer: unacknowledged transactions are delivered again when a consumer of the same name
    attaches.

    Several tasks may share one: each transaction goes to the task that has waited longest.
    """

    def __init__(
        self, hub: Hub, name: str, tables: tuple[str, ...], *, schema_changes: bool = False
    ) -> None:
        self._hub = hub
        self.name = name
        #: Whether it is given a `SchemaChanged` when columns of its tables have changed.
        self.schema_changes = schema_changes
        #: The tables to follow; empty for all published tables.
        self.tables = tables
        #: Those that are not published yet: locked by other sessions, dropped or renamed.
        self.unpublished: list[str] = []
        #: Whether it continues a copy: then it is reset if partitions add or remove rows.
        self.copied = False
        self._names = {each: parse_table(each) for each in tables}
        self._queue: deque[Transaction | Reset | SchemaChanged] = deque()
        self._bytes = 0
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._last: Reset | None = None
        self._error: BaseException | None = None
        self._closed = False
        #: Replaced after each reset.
        self._attachment = Attachment(hub, name)
        # The tables of the last call of _choose(), and which of them are followed.
        self._known: Mapping[int, Relation] | None = None
        self._wanted: frozenset[int] = frozenset()

    @property
    def outstanding(self) -> int:
        """The number of transactions that were received for it, and are not acknowledged."""
        return self._hub.outstanding(self.name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Transaction | Reset | Extra:
        """Return the next transaction, or a `Reset`, or a `SchemaChanged` if it wants these."""
        if (last := self._last) is not None and not self._closed:
            await self._hub.reset_handled(self, last)
            if self._last is last:  # another task may have received the next Reset meanwhile
                self._last = None
        queue = self._queue
        while not queue:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            await self._wait()
        if self._taken > YIELD_EVERY:
            # A consumer that awaits nothing else must not starve the reader and the status updates.
            self._taken = 0
            await asyncio.sleep(0)
            if not queue:
                return await self.__anext__()
        item = queue.popleft()
        if type(item) is Transaction:
            body = item._committed.body
            self._taken += 1 + body.count
            self._bytes -= body.size
            if self._hub.pressure.full:
                self._hub.pressure.taken()
        elif isinstance(item, Reset):
            self._last = item
        return cast("Transaction | Reset | Extra", item)

    async def _wait(self) -> None:
        """Wait until the queue may have an item."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                self._wake()  # the item is for the next waiting task
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
            raise

    async def aclose(self) -> None:
        """Detach the consumer and end its iteration; its acknowledgements stay stored."""
        self._end(None)
        self._hub.detach(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- for the hub ---------------------------------------------------------------------------

    def _put(self, item: Transaction | Reset | SchemaChanged) -> None:
        self._queue.append(item)
        if type(item) is Transaction:
            self._bytes += item._committed.body.size
        if self._waiting:
            self._wake()

    def _choose(
        self, committed: Committed, followed: Mapping[str, Followed]
    ) -> frozenset[int] | None:
        """Return the followed tables of a transaction; None for all of its tables."""
        known = committed.known()
        # Usually the same object as for the previous transaction.
        if known is not self._known:
            oids = {followed[each].oid for each in self.tables if each in followed}
            # Tables that were not confirmed yet are matched by name.
            names = [name for each, name in self._names.items() if each not in followed]
            self._known = known
            self._wanted = frozenset(
                oid
                for oid, relation in known.items()
                if oid in oids or any(n.matches(relation.schema, relation.name) for n in names)
            )
        wanted = self._wanted
        if len(wanted) == len(known):
            return None  # no other table is published
        touched = committed.touched()
        mine = wanted.intersection(touched)
        return None if mine and len(mine) == len(touched) else mine

    def _forget(self) -> None:
        """Discard the queue."""
        self._queue.clear()
        self._bytes = 0
        self._hub.pressure.taken()

    def _start_over(self) -> None:
        """Discard the queue, and make earlier acknowledgements invalid, for a reset."""
        self._forget()
        self._attachment = Attachment(self._hub, self.name)

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        self._error = error
        self._forget()
        while self._waiting:
            self._wake()

    def _wake(self) -> None:
        """Wake the task that has waited longest."""
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
