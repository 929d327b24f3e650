"""A replacement of the hub can receive the transactions of a replication client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import psycopg

from moored.kernel import Clock
from moored.postgres import History, Lsn
from moored.postgres._settings import Settings
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._integrity import Integrity
from moored.postgres.consume._store import StateStore
from moored.postgres.decode import Committed, Types
from moored.postgres.server._setup import Findings, Step
from moored.postgres.stream._collector import LogCollector
from moored.postgres.stream._replication import ReceivedTotals, ReplicationClient

from .conftest import Sql
from .server import LIMIT, one, until


class Log:
    """Keeps everything in memory: an applied transaction is safe at once."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self.full = False
        self.adopted = False
        self.kept: list[Committed] = []
        self.safe = 0
        self.confirmed: list[int] = []
        self.history: History | None = None
        self.resets: list[str] = []
        self.more = asyncio.Event()

    async def reload(self) -> None:
        pass

    async def reset(self, reason: str) -> None:
        self.resets.append(reason)
        self.kept.clear()

    def check_starts(self, history: History, found: Findings) -> None:
        self.history = history

    def begin(self, history: History, confirmed: int) -> None:
        assert self.history == history
        self.safe = max(self.safe, confirmed)

    def apply_all(self, done: Sequence[Committed]) -> None:
        self.kept += [each for each in done if each.end_lsn > self.safe]
        self.safe = max(self.safe, done[-1].end_lsn)
        self.full = True  # it takes one batch at a time
        self.more.set()

    def check_tables(self) -> None:
        pass

    def passed(self, end: int) -> None:
        self.safe = max(self.safe, end)

    async def room(self) -> None:
        await asyncio.sleep(0)
        self.full = False

    def flushed(self) -> int:
        return self.safe

    async def checkpoint(self, end: int) -> None:
        self.store.save(Lsn(end), {})
        self.confirmed.append(end)

    async def until(self, number: int) -> None:
        """Wait until there are so many."""
        async with asyncio.timeout(LIMIT):
            while len(self.kept) < number:
                self.more.clear()
                await self.more.wait()


def as_collector(hub: Hub) -> LogCollector:
    """The hub is a collector, too, for the type checker."""
    return hub


async def test_a_local_log_can_replace_the_hub(
    sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    await sql.execute("create publication everything for table orders")
    store = StateStore(tmp_path / "state.db")
    log, slot = Log(store), f"collected_{stream_id}"
    options = Settings(
        database_url=streamed_url,
        replication_url=streamed_url,
        state_dir=tmp_path,
        slot=slot,
        publication="everything",
        manual_publication=True,
    )

    async def conninfo() -> str:
        return psycopg.conninfo.make_conninfo(streamed_url)

    async def life(expected: int) -> None:
        """Run one connection until so many transactions were received and confirmed."""
        ready = asyncio.Event()
        client = ReplicationClient(
            conninfo=conninfo,
            settings=options,
            hub=log,
            clock=Clock.current(),
            report=lambda step: ready.set() if step is Step.READY_TO_STREAM else None,
            first_message=lambda: None,
            totals=ReceivedTotals(),
            types=Types(),
            describe_types=mock.AsyncMock(),
            published=lambda transaction: None,
        )
        running = asyncio.create_task(client.run())
        await asyncio.wait_for(ready.wait(), LIMIT)
        await Integrity(store, log, lambda name, detail: None).check(client.setup.findings)
        client.start_streaming()
        await sql.execute("insert into orders values (%s, 'x')", (expected,))
        await log.until(expected)
        query = (
            "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots "
            "where slot_name = %s"
        )
        end = str(Lsn(log.kept[-1].end_lsn))
        await until(lambda: one(sql, query, end, slot))
        running.cancel()
        await asyncio.wait({running})

    await life(1)
    await life(2)
    assert [[change.new for change in txn] for txn in log.kept] == [
        [{"id": 1, "name": "x"}],
        [{"id": 2, "name": "x"}],
    ]
    assert log.confirmed == sorted(log.confirmed)
    assert log.confirmed[-1] >= log.kept[-1].end_lsn
    assert not log.resets
    store.close()
