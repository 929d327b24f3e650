"""What a follower delivers: the rows of chunks, and transactions without what chunks have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

from ..consume import Transaction
from ..decode import Row
from ._joining import Delivered, JoinedChanges
from ._position import CopyPosition

__all__ = ["JoinedTransaction", "Rows"]

Acknowledge = Callable[[], Awaitable[None]]


class Rows(Sequence[Row]):
    """Rows of the table, as they were in a snapshot; call `ack()` once their effect is durable."""

    def __init__(
        self, table: str, rows: list[Row], position: CopyPosition, acknowledge: Acknowledge
    ) -> None:
        #: The name of the table, without its schema.
        self.table = table
        #: The position after these rows: store it with the effect, and pass it as `start=` later.
        self.position = position
        self._rows = rows
        self._acknowledge = acknowledge

    def __getitem__(self, place: int | slice) -> Row | list[Row]:  # type: ignore[override]
        return self._rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        return True  # also without rows: it must be acknowledged

    async def ack(self) -> None:
        """Acknowledge these rows, and all that were delivered before: they are not copied again."""
        await self._acknowledge()

    def __repr__(self) -> str:
        return f"<Rows of {self.table}: {len(self)}>"


class JoinedTransaction(Transaction):
    """A transaction, without the changes that the delivered rows contain already.

    :param changes: those that are left; None for all.
    :param columns: the columns that are read if all changes are left; None for all.
    """

    __slots__ = ("_acknowledge", "_changes", "_columns", "_copy_position")

    def __init__(
        self,
        txn: Transaction,
        changes: JoinedChanges | None,
        position: CopyPosition,
        acknowledge: Acknowledge,
        columns: tuple[int, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__(txn._committed, txn._attachment, txn._tables, txn._history)
        self._changes = changes
        self._columns = columns
        self._copy_position = position
        self._acknowledge = acknowledge

    @property
    def position(self) -> CopyPosition:  # type: ignore[override]
        """The position after this transaction: store it with the effect, pass it as `start=`."""
        return self._copy_position

    def _all(self) -> Iterator[Delivered]:
        if self._changes is not None:
            return iter(self._changes)
        if self._columns is not None:
            return self._committed.only(*self._columns)
        return super()._all()

    def __len__(self) -> int:
        return super().__len__() if self._changes is None else len(self._changes)

    async def ack(self) -> None:
        """Acknowledge the transaction, and the rows that were delivered before it."""
        await self._acknowledge()
        await super().ack()
