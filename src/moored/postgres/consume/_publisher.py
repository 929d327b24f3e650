"""Keep the tables of consumers published, and detect when one was not.

Each call also checks that publication and slot exist; without one of them, the stream ends.
One catalog query covers the tables of all consumers. A table that is not published, or is not the
one that its consumer follows, is locked, added to the publication, and confirmed under the lock;
only then does its consumer get a `Reset`. A consumer that copies the table then finds all later
changes in the stream. A table that was added here is removed when the last consumer that follows it
was dropped.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from moored.kernel import describe

from .._errors import StreamEnded
from .._settings import Settings
from ..server import _admin, uncancelled
from ._consumer import Changes
from ._hub import Hub
from ._publication_sql import (
    CATALOG,
    ENTRIES,
    MISSING,
    UNCOMPILED,
    by_hand,
    full_identity,
    lock_mode,
    marker,
    options_for,
)
from ._tables import Followed, Table, parse_table, shortened

__all__ = ["Publisher"]

log = logging.getLogger("moored.postgres")

#: The lock_timeout for a table, in seconds: sessions that write to it wait behind this lock.
LOCK_PATIENCE = 1.0
#: After so many tables that could not be locked, the others are left for the next call, too.
MOST_BUSY = 3

#: Errors for a table that is locked by another session, or that was just renamed, and for a
#: publication that was just dropped.
_LATER = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedObject,
)
#: Errors of the server for a table that can never be published as it is.
_REFUSED = (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError)

Connection = psycopg.AsyncConnection[Any]
Found = dict[str, Table]
Consumers = Sequence[weakref.ref[Changes]]


class Publisher:
    """Publishes and confirms the tables of all consumers.

    :param emit: emits an event: its name, and the details.
    """

    def __init__(
        self,
        hub: Hub,
        settings: Settings,
        emit: Callable[[str, str], None] = lambda name, detail: None,
    ) -> None:
        self._hub, self._emit = hub, emit
        self._publication, self._slot = settings.publication_name, settings.slot_name
        self._manual = settings.manual_publication
        # A publication that the user has named may have others who use it.
        self._removes = not settings.manual_publication and not settings.publication
        self._keyless: set[str] = set()
        self._gone: set[str] = set()
        #: What `_query_marker` has returned before and after the last check; empty if it differed.
        self._marker: list[Any] = []
        #: The changes of columns that the running check has reported.
        self._altered: set[str] = set()

    async def publish(self, conn: Connection) -> list[str]:
        """Publish and confirm tables; return those that are locked by other sessions or missing."""
        self._hub.checks += 1
        # Weak references: a consumer whose last reference is dropped meanwhile is detached.
        consumers = [weakref.ref(changes) for changes in self._hub.attached()]
        if not consumers and not (self._removes and self._hub.tables.unused([])):
            return []
        self._marker = await self._query_marker(conn)
        found, busy = await uncancelled(conn, self._publish_unconfirmed(conn, consumers))
        # A table that came in between, and goes again, leaves the catalog as it was before.
        if self._marker != await self._query_marker(conn):
            self._marker = []
        self._report_gone(consumers, found)
        waiting: set[str] = set()
        followed: dict[str, str] = {}
        self._altered.clear()
        try:
            for consumer in consumers:
                waiting |= await self._confirm_tables(consumer(), found, busy, followed)
        finally:
            if followed:
                await self._hub.tables.keep(followed)
        return sorted(waiting)

    async def changed(self, conn: Connection) -> bool:
        """Return whether the catalog has changed since the last call of `publish`."""
        if not self._hub.attached():
            await conn.execute("")  # it shows the pool whether the server answers
            return False
        return self._marker != await self._query_marker(conn)

    async def _query_marker(self, conn: Connection) -> list[Any]:
        query = marker(conn.info.server_version)
        await _admin.rows(conn, UNCOMPILED)
        named = {name for changes in self._hub.attached() for name in changes.tables}
        return await _admin.rows(conn, query, publication=self._publication, **_names(named))

    async def _publish_unconfirmed(
        self, conn: Connection, consumers: Consumers
    ) -> tuple[Found, set[str]]:
        """Publish tables; return all tables as they are afterwards, and the locked ones."""
        await self._check_existence(conn)
        found = await self._query_tables(conn, consumers)
        # The tables of a publication that was dropped meanwhile must not be refused as unpublished.
        await self._check_existence(conn)
        if self._removes and (unused := self._hub.tables.unused(found.values())):
            await self._remove(conn, unused)
        unconfirmed, busy = self._unconfirmed(_alive(consumers), found), set[str]()
        if unconfirmed:
            confirmed, busy = await self._publish(conn, unconfirmed)
            if confirmed:
                # If another program removes them again, the marker is again that of before.
                self._marker = []
            found = await self._query_tables(conn, consumers) | confirmed
        return found, busy

    async def _check_existence(self, conn: Connection) -> None:
        query = {"publication": self._publication, "slot": self._slot}
        for (missing,) in await _admin.rows(conn, MISSING, **query):
            raise StreamEnded(f"the {missing} does not exist")

    async def _query_tables(self, conn: Connection, consumers: Consumers) -> Found:
        tables = [changes.tables for changes in _alive(consumers)]
        wanted = {name for each in tables for name in each}
        everything = not all(tables)
        return await self._catalog(conn, wanted, everything=everything)

    async def _catalog(
        self, conn: Connection, wanted: Iterable[str], *, everything: bool = False
    ) -> Found:
        # The query may wait for locks of an ALTER TABLE: then a later call succeeds.
        patience = f"SET LOCAL lock_timeout = '{LOCK_PATIENCE:g}s'; {UNCOMPILED}"
        await conn.execute(patience.encode())
        rows = await _admin.rows(
            conn,
            CATALOG,
            **_names(wanted),
            publication=self._publication,
            everything=everything,
        )
        return {row[0]: Table.of(row) for row in rows}

    # -- which tables must be published --------------------------------------------------------

    def _unconfirmed(self, consumers: Sequence[Changes], found: Found) -> Found:
        """Return the tables to publish or confirm under a lock; refuse consumers of others."""
        unconfirmed: Found = {}
        for changes in consumers:
            followed = self._hub.tables.of(changes.name)
            own: Found = {}
            for name in changes.tables:
                table = found.get(name)
                if (why := self._problem(name, table, followed.get(name))) is not None:
                    self._hub.refuse(changes, why)
                    break
                if table is not None and not self._is_confirmed(table, followed.get(name)):
                    own[name] = table
            else:
                if any(name in followed for name in own):
                    # It is reset, and must get all its tables from one LSN on.
                    own = {name: found[name] for name in changes.tables if name in found}
                unconfirmed |= own
        # In the order of the names: two processes that lock the same tables cannot deadlock.
        return {} if self._manual else {name: found[name] for name in found if name in unconfirmed}

    def _is_confirmed(self, table: Table, followed: Followed | None) -> bool:
        known = followed is None or followed.difference(table.followed) is None
        return table.published and table.complete and known

    def _problem(self, name: str, table: Table | None, followed: Followed | None) -> str | None:
        """Return why a table can never be published as it is; None if it can."""
        if table is None:
            return None if followed is not None else f"the table {name} does not exist"
        if table.kind not in "rp" or table.persistence != "p":
            return (
                f"{table.exact} cannot be published: only ordinary tables can, neither views nor "
                "unlogged or temporary tables"
            )
        if self._manual and not (table.published and table.complete):
            return self._not_published([table])
        if table.keyless and table.published and table.exact not in self._keyless:
            self._keyless.add(table.exact)
            log.warning(
                "the table %s has no primary key, or a partition of it has none: the server "
                "refuses every UPDATE and DELETE on it. Add a primary key, or run %s",
                *(table.exact, "; ".join(map(full_identity, table.keyless))),
            )
        return None

    def _not_published(self, tables: Sequence[Table]) -> str:
        named = " and ".join(table.exact for table in tables)
        missing = by_hand(self._publication, tables)
        todo = f": its owner must run {missing}" if missing else ""
        return (
            f"the publication {self._publication} does not publish all changes of {named} under "
            f"that name{todo}. Changes of a partition are published under the name of its "
            "partitioned table, if that is in the publication as well"
        )

    # -- publishing ----------------------------------------------------------------------------

    async def _publish(self, conn: Connection, unconfirmed: Found) -> tuple[Found, set[str]]:
        """Publish all tables at once if none is locked, else one by one.

        Returns the confirmed tables, and those that are locked by other sessions.
        """
        # End the transaction of the catalog query before others begin, which lock.
        await conn.rollback()
        await conn.set_autocommit(True)
        try:
            try:
                return await self._publish_under_lock(conn, unconfirmed, {}, "NOWAIT"), set()
            except (psycopg.errors.LockNotAvailable, *_REFUSED):
                return await self._publish_each(conn, unconfirmed)
        finally:
            await conn.set_autocommit(False)

    async def _publish_each(self, conn: Connection, unconfirmed: Found) -> tuple[Found, set[str]]:
        confirmed: Found = {}
        busy: set[str] = set()
        for name, table in unconfirmed.items():
            if len(busy) >= MOST_BUSY:
                busy.add(name)
                continue
            try:
                confirmed = await self._publish_under_lock(conn, {name: table}, confirmed)
            except _LATER:
                busy.add(name)
            except _REFUSED as error:
                why = f"its tables cannot be published: {describe(error)}"
                if isinstance(error, psycopg.errors.InsufficientPrivilege):
                    if table.published and table.complete:
                        continue  # by its owner; only the lock is missing
                    why += (
                        f". Let this user own {table.exact} and the publication, or let their "
                        f"owner run {by_hand(self._publication, [table])}"
                    )
                for changes in self._hub.attached():
                    if name in changes.tables:
                        self._hub.refuse(changes, why)
        return confirmed, busy

    async def _publish_under_lock(
        self, conn: Connection, tables: Found, earlier: Found, nowait: str = ""
    ) -> Found:
        """Lock, add and confirm tables in one transaction; return them and the earlier ones.

        Without the lock, changes that a running transaction has made before would never be
        published.

        :param earlier: the tables that were confirmed before, one by one.
        """
        publication = sql.Identifier(self._publication)
        listed = sql.SQL(", ".join(each.quoted for each in tables.values()))
        keyless = [leaf for each in tables.values() if each.is_new for leaf in each.keyless]
        async with conn.transaction():
            await conn.execute(f"SET LOCAL lock_timeout = '{LOCK_PATIENCE:g}s'".encode())
            lock = sql.SQL("LOCK TABLE {} IN {} MODE {}")
            mode = sql.SQL(lock_mode(keyless))
            await conn.execute(lock.format(listed, mode, sql.SQL(nowait)))
            now = list((await self._catalog(conn, tables)).values())
            if options := options_for(now):
                change = sql.SQL("ALTER PUBLICATION {} SET ({})")
                text = sql.SQL(", ".join(options))
                await conn.execute(change.format(publication, text))
            new = [each for each in now if each.is_new]
            if new:
                add = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}")
                named = sql.SQL(", ".join(each.quoted for each in new))
                await conn.execute(add.format(publication, named))
            for leaf in keyless:
                await conn.execute(full_identity(leaf).encode())
            confirmed = await self._catalog(conn, tables)
        for table in new:
            log.info("the table %s is published from now on", table.exact)
        for leaf in keyless:
            log.warning("the table %s has no primary key: %s", leaf, full_identity(leaf))
        if new:
            oids = {table.oid for table in new}
            await self._hub.tables.keep_added(
                added=[each.listed for each in confirmed.values() if each.oid in oids]
            )
        if options:
            before, after = now[0].publication, next(iter(confirmed.values())).publication
            await self._hub.tables.publication_changed(before, after)
            # Otherwise the next check would take this change for one by another program.
            earlier = {
                name: each._replace(publication=after) if each.publication == before else each
                for name, each in earlier.items()
            }
        return earlier | confirmed

    async def _remove(self, conn: Connection, entries: Collection[int]) -> None:
        """Remove tables that were added here, and that no consumer follows any longer."""
        # A consumer that attaches meanwhile must wait until its tables are published again.
        self._hub.published.clear()
        query = {"publication": self._publication, "entries": list(entries)}
        if tables := await _admin.rows(conn, ENTRIES, **query):
            drop = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}")
            named = sql.SQL(", ONLY ").join(sql.Identifier(*each) for each in tables)
            try:
                async with conn.transaction():
                    await conn.execute(drop.format(sql.Identifier(self._publication), named))
            except psycopg.errors.LockNotAvailable:
                return  # until the next call
            except _REFUSED as error:
                log.warning("tables without consumers are still published: %s", describe(error))
            else:
                await conn.commit()
                log.info("no longer published: %s", ", ".join(".".join(each) for each in tables))
        await self._hub.tables.keep_added(removed=entries)

    # -- confirmation --------------------------------------------------------------------------

    async def _confirm_tables(
        self, changes: Changes | None, found: Found, busy: set[str], followed: dict[str, str]
    ) -> set[str]:
        """Confirm the tables of a consumer, and reset it if it has missed changes."""
        if changes is None or changes not in self._hub.attached():
            return set()  # it was refused, or has detached
        names = changes.tables or [name for name, table in found.items() if table.published]
        waiting = {name for name in names if name in busy or name not in found}
        self._hub.published.remove(waiting)
        changes.unpublished = sorted(waiting)
        ready = {name: found[name] for name in names if name not in waiting}
        if missing := [table for table in ready.values() if not table.published]:
            self._hub.refuse(changes, self._not_published(missing))
            return set()
        self._hub.published.add(ready)
        if not waiting:
            now = {name: table.followed for name, table in ready.items()}
            if not changes.copied:
                now = {name: each._replace(partitions=None) for name, each in now.items()}
            # The consumer's new copy has all changes before this LSN. If they were delivered after
            # the copy, a change whose successor was not published would overwrite it for good.
            at = max((table.log_end for table in ready.values()), default=0)
            missed = self._missed(changes, now)
            if missed is None:
                self._report_altered(changes, now)
            followed |= await self._hub.follow(changes, now, missed, at)
        return waiting

    def _report_altered(self, changes: Changes, now: dict[str, Followed]) -> None:
        before = self._hub.tables.of(changes.name)
        for name in now.keys() & before.keys():
            if (found := before[name].altered(now[name])) is not None:
                if (text := str(found)) not in self._altered:  # one event for all consumers
                    self._altered.add(text)
                    self._emit("schema_changed", text)
                if changes.schema_changes:
                    changes._put(found)

    def _report_gone(self, consumers: Consumers, found: Found) -> None:
        # Of those that were looked up, and that were neither refused nor closed since then.
        asked = set(_alive(consumers)).intersection(self._hub.attached())
        wanted = {name for changes in asked for name in changes.tables}
        if new := wanted - found.keys() - self._gone:
            log.warning(
                "tables of consumers no longer exist: %s; waiting until they are created again",
                shortened(new),
            )
        self._gone = wanted - found.keys()

    def _missed(self, changes: Changes, now: dict[str, Followed]) -> str | None:
        for name, before in self._hub.tables.of(changes.name).items():
            if name in now:
                if (why := before.difference(now[name])) is not None:
                    return why
            elif not changes.tables:
                return f"the table {before.schema}.{before.name} is no longer published"
        return None


def _alive(consumers: Consumers) -> list[Changes]:
    return [changes for each in consumers if (changes := each()) is not None]


def _names(wanted: Iterable[str]) -> dict[str, Any]:
    """Return the parameters of a query that finds tables by their names."""
    names = sorted(wanted)
    parsed = [parse_table(name) for name in names]
    return {
        "wanted": names,
        "schemas": [each.schema for each in parsed],
        "names": [each.name for each in parsed],
    }
