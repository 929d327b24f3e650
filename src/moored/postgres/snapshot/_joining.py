"""Join a transaction with the chunks of a copy, piece by piece.

A transaction may have millions of changes. So they are joined some hundred at a time, other tasks
run in between, and what is left is kept as messages, in a file when they are many (`Body`).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import TypeVar

from .._errors import ConfigurationError
from ..consume import Transaction
from ..decode import (
    HEADER,
    UNCHANGED,
    Body,
    Change,
    Delete,
    Emitted,
    Insert,
    Relation,
    Row,
    Shelf,
    Truncate,
    Update,
    read_change,
)
from ._join import ChangePart, CopyState, Placed
from ._reader import CurrentRows, TableReader
from ._source import KeyValues

__all__ = ["Delivered", "JoinedChanges", "check_columns", "joined"]

Delivered = Change | Truncate | Emitted
C = TypeVar("C", bound=Change)
Kept = tuple[Delivered, ChangePart]

#: So many changes, or bytes of them, are joined at once; more if a transaction is opened for each.
PIECE, READ_PIECE, PIECE_BYTES = 500, 2000, 2**20

#: What a message is preceded by, as long as the header of the stream: how it is read, its place
#: among `_others`; then its kind, and the number of its table.
_head = struct.Struct(f"!BI{HEADER - 5}xcI").pack
_place = struct.Struct("!I").unpack_from
_WHOLE, _DELETE, _WRITE, _OLD_KEY, _NEW_KEY, _OTHER = range(6)
_PARTS = {
    ChangePart.WHOLE: _WHOLE,
    ChangePart.DELETE: _DELETE,
    ChangePart.WRITE: _WRITE,
}
_KIND, _ROW = slice(HEADER, HEADER + 1), HEADER + 5


class JoinedChanges:
    """The changes of a transaction that are delivered: in memory, or in a file if they are many."""

    def __init__(self, shelf: Shelf) -> None:
        self._body = Body(shelf)
        self._relations: dict[int, Relation] = {}
        self._numbers: dict[Relation, int] = {}
        self._others: list[Truncate | Emitted] = []
        #: What is stored with the next piece.
        self.added: list[bytes] = []

    def add(self, change: Change, relation: Relation, how: int = _WHOLE) -> None:
        """Add a change, to be read with the columns of this table."""
        self.added.append(self.packed(change, relation, how))

    def packed(self, change: Change, relation: Relation, how: int) -> bytes:
        """Return what is `added` for a change."""
        return self.message(change._data[_KIND], change._data[_ROW:], relation, how)

    def message(self, kind: bytes, row: bytes, relation: Relation, how: int = _WHOLE) -> bytes:
        """Return the same for the rows in the message of a change."""
        number = self._numbers.setdefault(relation, len(self._numbers))
        self._relations[number] = relation
        return _head(how, 0, kind, number) + row

    def other(self, change: Truncate | Emitted) -> None:
        """Add what is no change of a row."""
        self.added.append(_head(_OTHER, len(self._others), b"-", 0))
        self._others.append(change)

    def keep(self) -> None:
        """Store what was added: call it after every piece."""
        self._body.extend(self.added)
        self.added = []

    def __len__(self) -> int:
        return self._body.count

    def __iter__(self) -> Iterator[Delivered]:
        for entry in self._body.entries():
            assert isinstance(entry, bytes)
            how = entry[0]
            if how == _OTHER:
                yield self._others[_place(entry, 1)[0]]
                continue
            change = read_change(entry, HEADER, self._relations)
            yield change if how == _WHOLE else _part(change, how)


def _part(change: Change, how: int) -> Change:
    """Return what is delivered of a change."""
    if how in (_DELETE, _OLD_KEY):
        return _made(Delete, change.relation, change.old, None)
    if how == _WRITE:
        return _made(Insert, change.relation, None, change.new)
    new, old = change.new or {}, change.old
    if old is not None:
        new = {name: old[name] if value is UNCHANGED else value for name, value in new.items()}
    return _made(Delete, change.relation, new, None)


def _made(kind: type[C], relation: Relation, old: Row | None, new: Row | None) -> C:
    change = kind(relation, b"", 0)
    change._rows = old, new
    return change


async def joined(
    reader: TableReader, state: CopyState, txn: Transaction, *, where: bool, columns: bool
) -> tuple[JoinedChanges | None, int | None]:
    """Return what must be delivered of a transaction; None if the copy must begin again.

    Also return the LSN up to which rows were read from the server; None if none were.

    :param where: whether the copy has a condition: then the changed rows are read from the server.
    :param columns: whether only some columns are delivered.
    """
    body = txn._committed.body
    made, limit = JoinedChanges(body.shelf), None
    only = reader.table.columns if columns else None
    most = READ_PIECE if where else PIECE
    for number, piece in enumerate(_pieces(_by_key(reader, txn), most)):
        if number:
            await asyncio.sleep(0)
        kept, begin_again = await _kept(reader, state, txn, txn._chosen(piece))
        if begin_again:
            return None, None
        if where:
            await _add_as_they_are_now(reader, txn, kept, made)
        else:
            limit = await _add(reader, txn, list(kept), made, only) or limit
        made.keep()
        await asyncio.sleep(0)
    return made, limit


def _by_key(reader: TableReader, txn: Transaction) -> Iterator[Delivered]:
    """Return the changes, and those of other tables; of the table's, only the key is read."""
    names = tuple(column.name for column in reader.table.key)
    return txn._committed.only(reader.table.oid, names)


def _pieces(changes: Iterator[Delivered], most: int) -> Iterator[Iterator[Delivered]]:
    """Yield the changes, some at a time; each piece must be taken before the next one."""
    for first in changes:
        yield _piece(chain([first], changes), most)


def _piece(changes: Iterator[Delivered], most: int) -> Iterator[Delivered]:
    size = 0
    for number, change in enumerate(changes, 1):
        yield change
        size += len(change._data) if isinstance(change, Change) else 0
        if number >= most or size >= PIECE_BYTES:
            return


async def _kept(
    reader: TableReader, state: CopyState, txn: Transaction, changes: Iterator[Delivered]
) -> tuple[Iterable[Kept], bool]:
    """Return what the chunks do not contain, and whether the copy must begin again."""
    if state.settled(txn.position.lsn):
        return zip(changes, repeat(ChangePart.WHOLE), strict=False), False
    piece = list(changes)
    table = reader.table
    keys: list[KeyValues] = []
    numbers: list[tuple[int | None, int | None]] = []
    for change in piece:
        old, new = (change.old, change.new) if isinstance(change, Change) else (None, None)
        first = second = None
        if old is not None:
            first = len(keys)
            keys.append(table.key_of(old))
        if new is not None:
            second = len(keys)
            keys.append(table.key_of(new, old))
        numbers.append((first, second))
    places = await reader.places(state.bounds, keys)
    placed = [
        Placed(
            change,
            None if first is None else places[first],
            None if second is None else places[second],
            isinstance(change, Truncate),
        )
        for change, (first, second) in zip(piece, numbers, strict=True)
    ]
    return state.join(txn.xid, txn.position.lsn, placed)


async def _add(
    reader: TableReader,
    txn: Transaction,
    kept: list[Kept],
    made: JoinedChanges,
    only: tuple[str, ...] | None,
) -> int | None:
    """Add changes; return the LSN up to which rows were read from the server, if any were."""
    moved = {
        number: key
        for number, (change, part) in enumerate(kept)
        if part is not ChangePart.DELETE and (key := _lacks_values(reader, change, only))
    }
    current = await reader.current(txn.xid, list(moved.values())) if moved else None
    places = {number: place for place, number in enumerate(moved)}
    for number, (change, part) in enumerate(kept):
        if not isinstance(change, Change):
            made.other(change)
            continue
        relation = _columns_of(change, only)
        if current is None or number not in places:
            made.add(change, relation, _PARTS[part])
            continue
        # The consumer may not have the row whose values the server did not send.
        if part is ChangePart.WHOLE:
            made.add(change, relation, _DELETE)
        if (row := current.rows.get(places[number])) is not None:
            made.added.append(made.message(b"I", row, current.relation))
    return None if current is None else current.limit


def _lacks_values(
    reader: TableReader, change: Delivered, only: tuple[str, ...] | None
) -> KeyValues | None:
    """Return the new key of a row that has moved, and of which some values were not sent."""
    if not isinstance(change, Update) or (old := change.old) is None:
        return None
    key = reader.table.key_of(change.new or {}, old)
    if key == reader.table.key_of(old):
        return None
    new = Update(_columns_of(change, only), change._data, _ROW).new or {}
    return key if UNCHANGED in new.values() else None


def _columns_of(change: Change, only: tuple[str, ...] | None) -> Relation:
    relation = change.relation.full
    return relation if only is None else relation.only(only)


async def _add_as_they_are_now(
    reader: TableReader, txn: Transaction, kept: Iterable[Kept], made: JoinedChanges
) -> None:
    """Add the changed rows as they are now: written if they meet the condition, else deleted.

    The stream has not all values that the condition may need.
    """
    # As bytes, and one by one: for many objects, the garbage collector would look at all there are.
    touched: dict[KeyValues, bytes] = {}
    key_of = reader.table.key_of
    for change, part in kept:
        if not isinstance(change, Change):
            made.other(change)
            continue
        new, old = change.new, change.old  # in the order that is faster to read
        if old is not None and part is not ChangePart.WRITE:
            touched[key_of(old)] = made.packed(change, change.relation, _OLD_KEY)
        if new is not None and part is not ChangePart.DELETE:
            touched[key_of(new, old)] = made.packed(change, change.relation, _NEW_KEY)
    if not touched:
        return
    await asyncio.sleep(0)  # each of the steps takes some milliseconds
    current: CurrentRows = await reader.current(txn.xid, list(touched))
    await asyncio.sleep(0)
    for place, gone in enumerate(touched.values()):
        row = current.rows.get(place)
        made.added.append(gone if row is None else made.message(b"U", row, current.relation))


def check_columns(reader: TableReader, txn: Transaction) -> None:
    """Raise `ConfigurationError` if the changes lack columns of the copy."""
    committed, oid = txn._committed, reader.table.oid
    described = [each for each in committed.body.described if each.oid == oid]
    for relation in described or filter(None, [committed.relations.get(oid)]):
        if lost := set(reader.table.columns) - set(relation.names):
            raise ConfigurationError(
                f"the changes of {reader.table.qualified} have no column "
                f"{', '.join(sorted(lost))}: it was renamed or dropped, or the publication leaves "
                "it out; change columns=, or the publication (the consumer then gets a Reset)"
            )
