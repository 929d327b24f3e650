"""What a follower delivers: the rows of chunks, and transactions without what chunks have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from .._errors import ConfigurationError
from ..consume import Transaction
from ..decode import UNCHANGED, Change, Delete, Emitted, Insert, Relation, Row, Truncate, Update
from ._join import ChangePart, CopyState, Joined, Placed
from ._position import CopyPosition
from ._reader import TableReader
from ._source import KeyValues

__all__ = ["Delivered", "JoinedTransaction", "Rows", "delivered"]

Delivered = Change | Truncate | Emitted
Acknowledge = Callable[[], Awaitable[None]]
C = TypeVar("C", bound=Change)


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
    """

    __slots__ = ("_acknowledge", "_changes", "_copy_position")

    def __init__(
        self,
        txn: Transaction,
        changes: list[Delivered] | None,
        position: CopyPosition,
        acknowledge: Acknowledge,
    ) -> None:
        super().__init__(txn._committed, txn._attachment, txn._tables, txn._history)
        self._changes = changes
        self._copy_position = position
        self._acknowledge = acknowledge

    @property
    def position(self) -> CopyPosition:  # type: ignore[override]
        """The position after this transaction: store it with the effect, pass it as `start=`."""
        return self._copy_position

    def __iter__(self) -> Iterator[Delivered]:
        return super().__iter__() if self._changes is None else iter(self._changes)

    def __len__(self) -> int:
        return super().__len__() if self._changes is None else len(self._changes)

    async def ack(self) -> None:
        """Acknowledge the transaction, and the rows that were delivered before it."""
        await self._acknowledge()
        await super().ack()


async def delivered(
    reader: TableReader, state: CopyState, txn: Transaction, *, where: bool, columns: bool
) -> tuple[list[Delivered] | None, int | None]:
    """Return what must be delivered of a transaction; None if the copy must begin again.

    Also return the LSN up to which rows were read from the server; None if none were.

    :param where: whether the copy has a condition: then the changed rows are read from the server.
    :param columns: whether only some columns are delivered.
    """
    joined = await _join(reader, state, txn)
    if joined.begin_again:
        return None, None
    if where:
        return await _read_again(reader, txn, joined), None
    made: list[Delivered] = []
    read: int | None = None
    for change, part in joined.kept:
        if not isinstance(change, Change):
            made.append(change)
            continue
        old, new = change.old, change.new
        moves = isinstance(change, Update) and old is not None
        if (
            moves
            and part is not ChangePart.DELETE
            and new is not None
            and UNCHANGED in new.values()
        ):
            # The consumer may not have the row whose values the server did not send.
            key = reader.table.key_of(new, old)
            if key != reader.table.key_of(old or {}):
                found, read = await reader.current(txn.xid, [key])
                if part is ChangePart.WHOLE:
                    made.append(_change(Delete, change.relation, old, None))
                made += [_change(Insert, change.relation, None, row) for row in found.values()]
                continue
        if part is ChangePart.DELETE:
            change = _change(Delete, change.relation, old, None)
        elif part is ChangePart.WRITE:
            change = _change(Insert, change.relation, None, new)
        made.append(change)
    return ([_only(reader, each) for each in made] if columns else made), read


async def _join(reader: TableReader, state: CopyState, txn: Transaction) -> Joined:
    """Find the chunks of all keys of a transaction, and join it."""
    table = reader.table
    keys: list[KeyValues] = []

    def number(key: KeyValues) -> int:
        keys.append(key)
        return len(keys) - 1

    placed = []
    for change in txn:
        if isinstance(change, Change):
            old, new = change.old, change.new
            placed.append(
                Placed(
                    change,
                    None if old is None else number(table.key_of(old)),
                    None if new is None else number(table.key_of(new, old)),
                )
            )
        else:
            placed.append(Placed(change, truncate=isinstance(change, Truncate)))
    places = await reader.places(state.bounds, keys)
    found = [
        each._replace(
            old=None if each.old is None else places[each.old],
            new=None if each.new is None else places[each.new],
        )
        for each in placed
    ]
    return state.join(txn.xid, txn.position.lsn, found)


async def _read_again(reader: TableReader, txn: Transaction, joined: Joined) -> list[Delivered]:
    """Return the changed rows as they are now: written if they meet the condition, else deleted.

    The stream has not all values that the condition may need.
    """
    made: list[Delivered] = []
    touched: dict[KeyValues, Relation] = {}
    for change, part in joined.kept:
        if not isinstance(change, Change):
            made.append(change)
            continue
        old, new = change.old, change.new
        if old is not None and part is not ChangePart.WRITE:
            touched[reader.table.key_of(old)] = change.relation
        if new is not None and part is not ChangePart.DELETE:
            touched[reader.table.key_of(new, old)] = change.relation
    if touched:
        found, _ = await reader.current(txn.xid, list(touched))
        names = [column.name for column in reader.table.key]
        for key, relation in touched.items():
            if (row := found.get(key)) is not None:
                made.append(_change(Update, relation, None, row))
            else:
                made.append(_change(Delete, relation, dict(zip(names, key, strict=True)), None))
    return made


def _change(kind: type[C], relation: Relation, old: Row | None, new: Row | None) -> C:
    change = kind(relation, b"", 0)
    change._rows = old, new
    return change


def _only(reader: TableReader, change: Delivered) -> Delivered:
    """Return a change with the columns of the copy only."""
    if not isinstance(change, Change):
        return change

    def some(row: Row | None) -> Row | None:
        if row is None:
            return None
        return {name: row[name] for name in reader.table.columns if name in row}

    if change.new is not None and (lost := set(reader.table.columns) - change.new.keys()):
        raise ConfigurationError(
            f"the changes of {reader.table.qualified} have no column {', '.join(sorted(lost))}: it "
            "was renamed or dropped, or the publication leaves it out; change columns=, or the "
            f"publication (the consumer then gets a Reset)"
        )
    return _change(type(change), change.relation, some(change.old), some(change.new))
