"""What a consumer of an app reads: the changes of a stream, or the events of an outbox."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, Protocol

from moored.kernel import Child, counted, duration
from moored.postgres import (
    Changes,
    Health,
    Outbox,
    OutboxEvent,
    Parking,
    Postgres,
    Reset,
    Transaction,
)
from moored.service import Wiring

from ._parts import PartEntry
from ._shared_outbox import SharedOutbox

__all__ = ["Consumed", "EventsOfOutbox", "Item", "TransactionsOfStream"]

Item = Transaction | OutboxEvent

#: Transactions that a consumer may have in hand without being behind.
IN_HAND = 2


class Consumed(Protocol):
    """The source of a consumer's items."""

    #: What one item is called.
    noun: str
    #: Why the consumer is not ready before `ready()` has returned.
    not_ready: str
    #: The Postgres whose stream decides which replica gets the items; None if every one does.
    stream: Postgres | None

    async def opened(self) -> None:
        """Wait until the source is open."""

    def attach(self) -> AbstractAsyncContextManager[AsyncIterator[Item | Reset]]:
        """Return the items that are not acknowledged yet."""

    def standing_by(self) -> AbstractAsyncContextManager[object]:
        """Keep the consumer's place while another instance has the stream."""

    def passed(self, items: Any, item: Item | Reset) -> bool:
        """Whether an item that has failed here does not come again: another process had it."""

    async def ready(self) -> None:
        """Wait until no item can be missed any more; called while it is attached."""

    def position(self, item: Any) -> str:
        """Return the position of an item."""

    def parking(self) -> Parking[Any]:
        """Return where its items can be parked."""

    @property
    def delayed(self) -> str:
        """Why items come late; empty if they do not."""

    @property
    def behind(self) -> str:
        """What it has not handled yet; empty if it has caught up."""

    def statistics(self) -> dict[str, int]:
        """Return what is known of the items to handle."""

    def explain(self) -> Iterator[str]:
        """Yield what the consumer waits for."""

    def children(self, entry: PartEntry, wiring: Wiring) -> Sequence[Child]:
        """Return what runs beside the consumer."""


class TransactionsOfStream:
    """The transactions of a change stream."""

    noun = "transaction"
    not_ready = "its tables are not published yet"

    def __init__(self, pg: Postgres, consumer: str, tables: Iterable[str]) -> None:
        self._pg = pg
        self.stream: Postgres | None = pg
        self._consumer = consumer
        self._tables = [tables] if isinstance(tables, str) else list(tables)
        self._changes: Changes | None = None

    async def opened(self) -> None:
        pass  # the consumer comes after it

    def attach(self) -> AbstractAsyncContextManager[AsyncIterator[Item | Reset]]:
        self._changes = self._pg.changes(self._consumer, tables=self._tables)
        return aclosing(self._changes)

    @property
    def delayed(self) -> str:
        waiting = () if self._changes is None else self._changes.unpublished
        why = "locked by other sessions, dropped or renamed"
        return f"waits for {', '.join(waiting)}: {why}" if waiting else ""

    def standing_by(self) -> AbstractAsyncContextManager[object]:
        return self.attach()  # one that is unknown when the stream begins has a Reset

    def passed(self, items: Any, item: Item | Reset) -> bool:
        return False

    async def ready(self) -> None:
        if self._tables:
            await self._pg.wait_until_published(*self._tables, timeout=math.inf)
        else:
            await self._pg.wait_until_active()

    def position(self, item: Transaction) -> str:
        return str(item.position)

    def parking(self) -> Parking[Any]:
        return Parking.of(self._pg, self._consumer)

    @property
    def behind(self) -> str:
        number = self.statistics()["outstanding"]
        return f"{counted(number, 'transaction')} to handle" if number > IN_HAND else ""

    def statistics(self) -> dict[str, int]:
        return {"outstanding": 0 if self._changes is None else self._changes.outstanding}

    def explain(self) -> Iterator[str]:
        if self._changes is not None and (number := self._changes.outstanding):
            yield f"{counted(number, 'received transaction')} to acknowledge"
        if self.delayed:
            yield self.delayed
        if self._pg.health is not Health.ACTIVE:
            yield f"the stream is {self._pg.health.value}"

    def children(self, entry: PartEntry, wiring: Wiring) -> Sequence[Child]:
        return ()


class EventsOfOutbox:
    """The events of an outbox."""

    noun = "event"
    not_ready = SharedOutbox.not_open

    def __init__(
        self,
        outbox: Outbox,
        shared: SharedOutbox,
        consumer: str,
        channels: Iterable[str],
        tenant: str | None,
    ) -> None:
        self._outbox = outbox
        self._shared = shared
        self.stream = outbox.postgres
        self._consumer = consumer
        self._channels = [channels] if isinstance(channels, str) else list(channels)
        self._tenant = tenant

    async def opened(self) -> None:
        await self._shared.wait()

    def attach(self) -> AbstractAsyncContextManager[AsyncIterator[Item | Reset]]:
        return self._outbox.consume(self._consumer, channels=self._channels, tenant=self._tenant)

    def standing_by(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()  # its cursor is in the database

    def passed(self, items: Any, item: Item | Reset) -> bool:
        return isinstance(item, OutboxEvent) and items.position >= item.id

    async def ready(self) -> None:
        pass  # its cursor is stored

    def position(self, item: OutboxEvent) -> str:
        return item.cursor

    def parking(self) -> Parking[Any]:
        return Parking.of(self._outbox, self._consumer)

    @property
    def delayed(self) -> str:
        return self._outbox.delayed

    @property
    def behind(self) -> str:
        found = self._outbox.last_status
        lags = (
            (each.lag for each in found.consumers if each.name == self._consumer) if found else ()
        )
        return next((f"{duration(lag)} behind" for lag in lags if lag), "")

    def statistics(self) -> dict[str, int]:
        return {}

    def explain(self) -> Iterator[str]:
        if self.behind:
            yield f"it is {self.behind}"

    def children(self, entry: PartEntry, wiring: Wiring) -> Sequence[Child]:
        return [self._shared.child(entry, wiring)]
