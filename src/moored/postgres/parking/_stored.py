"""The form in which items are parked: a head in JSON, and the messages of a transaction.

The messages are stored as the server has sent them, with the descriptions of their tables, so that
the same code decodes them again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import psycopg

from moored.kernel import counted, in_thread

from .._errors import ConfigurationError, DecodeError
from .._position import Position
from ..consume import Attachment, Transaction
from ..decode import Body, Column, Committed, Relation, ReplicaIdentity, Types
from ..outbox import Cursor, OutboxEvent
from ..server._admin import own_types

__all__ = ["Stored", "StoredEvents", "StoredTransactions"]

_VERSION = 1
_size = struct.Struct("!i")

T = TypeVar("T")


class Stored(Protocol[T]):
    """How the items of one consumer are named, stored and read."""

    def position(self, item: T) -> str:
        """Return what identifies an item among those of its consumer."""

    def describe(self, item: T) -> str:
        """Return what an item is, for people."""

    def size(self, item: T) -> int:
        """Return about how many bytes an item has, before it is packed."""

    def pack(self, item: T) -> bytes:
        """Return an item as bytes; called in a thread."""

    async def unpack(self, content: bytes, conn: psycopg.AsyncConnection[Any]) -> T:
        """Return the item; its acknowledgement has no effect."""


class StoredEvents:
    """Events of an outbox."""

    def position(self, item: OutboxEvent) -> str:
        return item.cursor

    def describe(self, item: OutboxEvent) -> str:
        tenant = "" if item.tenant is None else f" of the tenant {item.tenant}"
        return f"event {item.id} in {item.channel}{tenant}"

    def size(self, item: OutboxEvent) -> int:
        return len(item.payload)

    def pack(self, item: OutboxEvent) -> bytes:
        values = [item.cursor, item.tenant, item.channel, item.payload, item.at.isoformat()]
        return json.dumps([_VERSION, *values]).encode()

    async def unpack(self, content: bytes, conn: psycopg.AsyncConnection[Any]) -> OutboxEvent:
        version, cursor, tenant, channel, payload, at = json.loads(content)
        _check(version)
        event = OutboxEvent(
            Cursor.parse(cursor), tenant, channel, payload, datetime.fromisoformat(at)
        )
        event._consumer = cast(Any, _Acknowledged())
        return event


class _Acknowledged:
    """In place of the consumer of an event that was acknowledged when it was parked."""

    async def _acknowledge(self, event: OutboxEvent, conn: Any) -> None:
        pass


class StoredTransactions:
    """Transactions of a change stream.

    :param attachment: returns the consumer's attachment, which each transaction refers to.
    :param types: returns the known types of the database.
    """

    def __init__(self, attachment: Callable[[], Attachment], types: Callable[[], Types]) -> None:
        self._attachment = attachment
        self._types = types

    def position(self, item: Transaction) -> str:
        if type(item) is not Transaction:
            raise ConfigurationError(
                f"{item!r} cannot be parked: an item of follow() has its meaning only in the "
                "order of its copy; handle it again, or read the changes with changes()"
            )
        return str(item.position)

    def describe(self, item: Transaction) -> str:
        known, tables = item._committed.known(), item._tables
        oids = item._committed.touched()
        names = [known[oid].qualified for oid in oids if tables is None or oid in tables]
        of = f" of {', '.join(sorted(names))}" if names else ""
        return f"transaction {item.xid} at {item.commit_lsn}: {counted(len(item), 'change')}{of}"

    def size(self, item: Transaction) -> int:
        return item._committed.body.size

    def pack(self, item: Transaction) -> bytes:
        committed, tables = item._committed, item._tables
        touched = committed.touched()
        first = [each for oid, each in committed.relations.items() if oid in touched]
        head = {
            "version": _VERSION,
            "position": str(item.position),
            "xid": committed.xid,
            "commit_lsn": committed.commit_lsn,
            "time": committed.time,
            "origin": committed.origin,
            "count": committed.body.count,
            "tables": None if tables is None else sorted(tables),
            "relations": [_plain(each) for each in first],
            "described": [_plain(each) for each in committed.body.described],
        }
        packed = json.dumps(head).encode()
        return b"".join([_size.pack(len(packed)), packed, *_messages(committed.body)])

    async def unpack(self, content: bytes, conn: psycopg.AsyncConnection[Any]) -> Transaction:
        types = self._types()
        # In a thread: a large transaction has a million messages.
        read = partial(_read, content, types, self._attachment())
        item, used = await in_thread(read, name="moored parked item")
        if unknown := types.unknown(used):
            types.add(unknown, await own_types(conn, unknown))
        return item


def _read(content: bytes, types: Types, attachment: Attachment) -> tuple[Transaction, set[int]]:
    """Return a transaction, and the types of its tables."""
    (size,) = _size.unpack_from(content)
    head = json.loads(content[_size.size : _size.size + size])
    _check(head["version"])
    position, tables = Position.parse(head["position"]), head["tables"]
    first, described = (_relations(head[key], types) for key in ("relations", "described"))
    body = Body()
    for entry in _entries(content, _size.size + size):
        if isinstance(entry, int):
            body.describe(described[entry])
        else:
            body.append(entry)
    body.count = head["count"]
    committed = Committed(
        head["xid"],
        body,
        {each.oid: each for each in first},
        head["commit_lsn"],
        int(position.lsn),
        head["time"],
        head["origin"],
    )
    chosen = None if tables is None else frozenset(tables)
    item = Transaction(committed, attachment, chosen, position.history, acknowledged=True)
    return item, {column.type_oid for each in (*first, *described) for column in each.columns}


def _check(version: int) -> None:
    if version != _VERSION:
        raise DecodeError(
            f"the item was parked in the form {version}, and this program reads {_VERSION}: retry "
            "it with the version that has parked it"
        )


def _messages(body: Body) -> Iterator[bytes]:
    """Yield each message after its size; for a description of a table, a negative number."""
    described = 0
    for entry in body.entries():
        if isinstance(entry, Relation):
            described += 1
            yield _size.pack(-described)
        else:
            yield _size.pack(len(entry))
            yield entry


def _entries(content: bytes, at: int) -> Iterator[bytes | int]:
    """Yield the messages, and the numbers of the descriptions, from this offset on."""
    while at < len(content):
        (size,) = _size.unpack_from(content, at)
        at += _size.size
        if size < 0:
            yield -size - 1
        else:
            yield content[at : at + size]
            at += size


def _plain(relation: Relation) -> list[Any]:
    names = relation.oid, relation.schema, relation.name, relation.identity.value
    return [*names, [list(column) for column in relation.columns]]


def _relations(plain: Iterable[Collection[Any]], types: Types) -> list[Relation]:
    found = []
    for oid, schema, name, identity, columns in plain:
        made = Relation(
            oid, schema, name, ReplicaIdentity(identity), [Column(*each) for each in columns]
        )
        made.types = types
        found.append(made)
    return found
