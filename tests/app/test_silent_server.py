"""One server that is stopped is told by every link to it: pool, stream, listener and outbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from tests.frozen import frozen
from tests.reservoir.harness import until

from moored.app import App
from moored.broker import ApiKeys
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import OutboxEvent, Reset
from moored.service import Config

#: Seconds within which everything here happens, on a busy machine too.
LIMIT = 60.0
#: Three times the five seconds within which a silence is told.
PROMISED = 15.0


@pytest.fixture
def server() -> Iterator[SyncEmbeddedPostgres]:
    """A server that nothing else uses."""
    options = {"wal_level": "logical", "autovacuum": "off"}
    with SyncEmbeddedPostgres(options=options) as server:
        yield server


@pytest.mark.parametrize("callers", [6, 0])
async def test_every_link_tells_that_the_server_is_silent(
    callers: int, server: SyncEmbeddedPostgres, tmp_path: Path
) -> None:
    """Whether callers wait for answers or not, and each time."""
    app = App("orders", config=Config())
    db = app.pool(server.url, name="db", max_size=4)
    pg = app.postgres(server.url, name="pg", notify_url=server.url, state_dir=tmp_path)
    stop, answers = asyncio.Event(), 0

    async def call() -> None:
        nonlocal answers
        while not stop.is_set():
            async with db.connection() as conn:
                await conn.execute("select pg_sleep(0.05)")
            answers += 1

    @app.consumer(pg.outbox, "mail")
    async def mail(event: OutboxEvent | Reset) -> None: ...

    app.broker(pg.outbox, name="live", authenticate=ApiKeys({"key": "acme"}))

    def health(part: str) -> str:
        assert app.service is not None
        return app.service.view.parts()[part]

    def sample(name: str) -> float:
        """Return the largest value of a metric; -1 if there is none yet."""
        assert app.service is not None
        lines = generate_latest(app.service.registry).decode().splitlines()
        return max(
            (float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)),
            default=-1.0,
        )

    told: dict[str, Callable[[], object]] = {
        "db is degraded": lambda: health("db") == "degraded",
        "pg is degraded": lambda: health("pg") == "degraded",
        "consumer is degraded": lambda: health("consumer-mail") == "degraded",
        "broker is degraded": lambda: health("live") == "degraded",
        "db explains": lambda: f"{db.reservoir.place} has not answered for" in app.explain("db"),
        "stream explains": lambda: "the change stream for" in app.explain("pg"),
        "outbox explains": lambda: "had no answer of the server for" in app.explain("pg"),
        "listener explains": lambda: "listener degraded" in app.explain("pg"),
        "db in metrics": lambda: sample("moored_reservoir_silent_seconds"),
        "stream in metrics": lambda: sample("moored_postgres_silent_seconds"),
        "pools in metrics": lambda: sample("moored_postgres_pool_silent_seconds"),
        "outbox in metrics": lambda: sample("moored_outbox_unanswered_seconds") > 2.0,
        "listener in metrics": lambda: not sample("moored_postgres_listener_up"),
    }
    async with app:
        await app.ready(LIMIT)
        await pg.outbox.install()
        async with asyncio.TaskGroup() as group:
            await until(lambda: sample("moored_outbox_unanswered_seconds") >= 0, "begun", LIMIT)
            for _ in range(callers):
                group.create_task(call())
            for _ in range(2 if callers else 1):
                enough = answers + 2 * callers
                await until(lambda: answers >= enough, "queries are answered", LIMIT)  # noqa: B023
                await until(lambda: app.status == "active", "all is well", LIMIT)
                took: dict[str, float] = {}
                with frozen(server) as began:
                    while left := told.keys() - took.keys():
                        for what in left:
                            if told[what]():
                                took[what] = time.monotonic() - began
                        if time.monotonic() - began > PROMISED:
                            pytest.fail(f"{left}: {app.explain('db')} {app.explain('pg')}")
                        await asyncio.sleep(0.05)
            await until(lambda: app.status == "active", "all is well", LIMIT)
            stop.set()


async def test_long_statements_are_not_a_silent_server(server: SyncEmbeddedPostgres) -> None:
    """One beside others changes nothing; if all connections run one, that is what is told."""
    app = App("orders", config=Config())
    db = app.pool(server.url, name="db", max_size=2)

    async def call(seconds: float) -> None:
        async with db.connection() as conn:
            await conn.execute("select pg_sleep(%s)", (seconds,))

    async with app, asyncio.TaskGroup() as group:
        await app.ready(LIMIT)
        long = group.create_task(call(4.5))
        while not long.done():
            await call(0.05)
            assert (app.status, db.silent_for) == ("active", 0.0)
        uses = [group.create_task(call(seconds)) for seconds in (4.5, 4.5, 0.0)]
        await until(lambda: app.status == "degraded", "a caller waits for long", LIMIT)
        assert "1 caller waits" in app.explain("db")
        while not uses[0].done():
            assert db.silent_for == 0.0
            await asyncio.sleep(0.1)
