"""Looks at the server for what is final: one at a time, shared by all readers of an outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, LiteralString, NamedTuple, Protocol

from moored.kernel import Clock

from .._errors import ConfigurationError
from .._position import HISTORY, History
from ._barrier import Barrier
from ._ddl import VERSION

#: After a look that scans the server's table of locks, which other sessions wait for, comes a pause
#: of so many times as long as it took, and of so many seconds at most.
PAUSE, LONGEST_PAUSE = 5, 0.05
#: A look takes milliseconds, whatever the outbox holds. After so many seconds its connection is
#: cut: it leads to a server or a pooler that does not answer, and another one may.
WITHIN = 10.0

READ_COMMITTED: LiteralString = "set transaction isolation level read committed;\n"
# The history, and what changes when the server restarts or recovers from a crash: after that, ids
# may be given again. The start time of the postmaster stays the same over a crash, but the
# statistics are reset (before PostgreSQL 15 it is slow to query that).
SERVER: LiteralString = (
    HISTORY
    + """,
        concat_ws(' ', extract(epoch from pg_postmaster_start_time()),
            case when current_setting('server_version_num')::int >= 150000
                then extract(epoch from pg_stat_get_bgwriter_stat_reset_time()) end) as start"""
)
# First the highest id, and then, in a later snapshot, the holders of the lock: a transaction that
# is not among them is given its ids later. Columns of other versions of the tables are left alone.
# The lock of a partition counts, too: an INSERT directly into one takes no other.
_LOOK: LiteralString = (
    READ_COMMITTED
    + SERVER
    + """,
        v.version, (to_jsonb(v) ->> 'final')::bigint, pg_current_snapshot()::text,
        (select seqcache from pg_sequence
         where seqrelid = pg_get_serial_sequence({outbox}, 'id')::regclass),
        case when v.version = {version} then (select max(id) from {schema}.outbox) end
    from {schema}.outbox_state v;
    with newer as materialized (
        select case when v.version = {version} then (select max(id) from {schema}.outbox) end
            > %(final)s as found
        from {schema}.outbox_state v
    )
    select case when found then array(
        select distinct virtualtransaction from pg_locks
        where locktype = 'relation' and mode = 'RowExclusiveLock' and granted
            and database = (select oid from pg_database where datname = current_database())
            and relation in (select {outbox}::regclass union all
                select inhrelid from pg_inherits where inhparent = {outbox}::regclass)
    ) end from newer
    """
)


class Server(NamedTuple):
    """A run of a server: after a restart, nothing that was found before is true."""

    history: History
    start: str


class Look(NamedTuple):
    """What was found."""

    server: Server
    barrier: Barrier
    #: The snapshot of the highest id, as of pg_current_snapshot().
    snapshot: str

    @property
    def final(self) -> int:
        """Every event up to this id is visible by now, or will never exist."""
        return self.barrier.final

    @property
    def highest(self) -> int:
        """The highest id that was visible."""
        return self.barrier.highest


class _Results(Protocol):
    def __call__(
        self, query: LiteralString, within: float, /, **values: Any
    ) -> Awaitable[list[list[Any]]]: ...


class Looks:
    """Looks at the server, and what is known from the looks so far."""

    def __init__(self, results: _Results) -> None:
        self._results = results
        #: The last look; None before the first one.
        self.last: Look | None = None
        # The numbers of the newest look that has begun, and of the last one that has ended, and
        # the error of that one.
        self._begun = self._ended = 0
        self._error: Exception | None = None
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0

    async def from_now(self) -> Look:
        """Return a look that begins after this call; callers at a time share one, or its error."""
        begun = self._begun
        async with self._one_at_a_time:
            if self._ended > begun:
                if self._error is not None:
                    raise self._error
                assert self.last is not None
                return self.last
            clock = Clock.current()
            if (pause := self._not_before - clock.monotonic()) > 0:
                await asyncio.sleep(pause)
            self._begun += 1
            before = clock.monotonic()
            try:
                self.last, scanned = await self._look(self.last)
            except Exception as error:
                self._error, self._ended = error, self._begun
                raise
            self._error, self._ended = None, self._begun
            if scanned:
                now = clock.monotonic()
                self._not_before = now + min(PAUSE * (now - before), LONGEST_PAUSE)
            return self.last

    async def _look(self, last: Look | None) -> tuple[Look, bool]:
        """Look once; also return whether it has scanned the table of locks, for newer ids."""
        while True:
            final = 0 if last is None else last.final
            results = await self._results(_LOOK, WITHIN, final=final)
            _, ((*found, cache, highest),), ((holders,),) = results
            system_id, timeline, start, version, final, snapshot = found
            _check(version, cache)
            server = Server(History(system_id, timeline), start)
            if last is not None and last.server == server:
                break
            # Of the transactions that are open nothing is known but what is stored as final.
            last = Look(server, Barrier.at(final), snapshot)
        barrier = last.barrier
        if holders is not None:
            barrier = barrier.look(highest or 0, holders)
        return Look(server, barrier, snapshot), holders is not None


def _check(version: int, cache: int | None) -> None:
    if version != VERSION:
        raise ConfigurationError(
            f"the outbox in the database has version {version}, and this program needs {VERSION}: "
            + ("run `moored outbox upgrade`" if version < VERSION else "update this program")
        )
    if cache not in (None, 1):
        raise ConfigurationError(
            f"the sequence of the outbox has CACHE {cache}, so that a transaction may get an id "
            "from before it began, and its event may be missed: run `ALTER TABLE … ALTER id SET "
            "CACHE 1` for the outbox, and restart the publishers, whose sessions keep such ids"
        )
