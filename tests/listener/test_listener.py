"""A listener on a real PostgreSQL, with a real PgBouncer for the pooled path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import empty_database, require_server

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Condition, WaitTimeout
from moored.postgres import ConfigurationError, Health, PostgresError
from moored.postgres.listen import Gap, Listener, Notification, NotifyRefused, PoolerRefused
from moored.postgres.listen._direct import direct_conninfo
from moored.reservoir import AsyncConnectionPool

from .breaks import LIMIT, listener_pids, next_event, run_sql, until

PLAIN = {"prepare_threshold": None}


@pytest.fixture(scope="module")
def direct(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    with empty_database(postgres) as url:
        yield url


@pytest.fixture(scope="module")
def bouncer(direct: str) -> Iterator[str]:
    with pgbouncer(require_server("pgbouncer"), direct, pool_size=2) as url:
        yield url


@asynccontextmanager
async def pools(kind: str, url: str) -> AsyncIterator[Any]:
    """A pool of each kind that `notify_through` accepts."""
    if kind == "url":
        yield url
    elif kind == "asyncpg":
        async with asyncpg.create_pool(url, min_size=1, max_size=2, statement_cache_size=0) as pool:
            yield pool
    elif kind == "psycopg_pool":
        async with psycopg_pool.AsyncConnectionPool(url, kwargs=PLAIN, min_size=1) as pool:
            yield pool
    elif kind == "reservoir of asyncpg":
        async with AsyncConnectionPool[asyncpg.Connection](
            url, connect=asyncpg.connect, kwargs={"statement_cache_size": 0}, max_size=2
        ) as ours:
            yield ours
    else:
        async with AsyncConnectionPool(url, kwargs=PLAIN, max_size=2) as ours:
            yield ours


KINDS = ["reservoir", "reservoir of asyncpg", "psycopg_pool", "asyncpg", "url"]


@pytest.mark.every_loop(always=True)
@pytest.mark.parametrize("kind", KINDS)
async def test_notifications_through_a_pool_arrive(direct: str, bouncer: str, kind: str) -> None:
    async with pools(kind, bouncer) as pool, Listener(direct, notify_through=pool) as listener:
        assert listener.up
        async with listener.subscribe("orders", 'sh"ips') as events:
            for number in range(8):
                await listener.notify("orders", f"it's \\ {number} é")
                event = await next_event(events)
                assert isinstance(event, Notification)
                assert event[:2] == ("orders", f"it's \\ {number} é")
            await listener.notify('sh"ips')
            assert (await next_event(events))[:2] == ('sh"ips', "")
        canary = listener.monitor.conditions()
        # 0.0 counts: the clock of uvloop is in milliseconds.
        assert listener.statistics()["canary_latency"] is not None
        assert canary["connected"].met
        assert listener.health is Health.ACTIVE


async def test_exactly_one_direct_backend_exists(direct: str, bouncer: str) -> None:
    # A name of its own: PgBouncer's connections keep the name of their last client.
    async with (
        Listener(direct, notify_through=bouncer, application_name="the only one") as listener,
        listener.subscribe("a"),
        listener.subscribe("b"),
    ):
        assert len(await listener_pids(direct, "the only one")) == 1


async def test_channels_change_while_notifications_flow(direct: str) -> None:
    async with Listener(direct, notify_through=direct) as listener:  # noqa: SIM117
        async with listener.subscribe("a") as events, listener.subscribe("a", "b") as others:

            async def flow() -> None:
                for number in range(200):
                    await listener.notify("a", str(number))

            flowing = asyncio.create_task(flow())
            for number in range(10):
                await events.listen("c")
                async with listener.subscribe("c") as witness:
                    await listener.notify("c", str(number))
                    # The server sends no notification that it has not sent before an UNLISTEN.
                    await next_event(witness)
                await events.unlisten("c")
            await flowing
            await listener.notify("b", "end")
            seen = [await next_event(events) for _ in range(210)]
            assert [e[1] for e in seen if e[0] == "a"] == [str(n) for n in range(200)]
            assert [e[1] for e in seen if e[0] == "c"] == [str(n) for n in range(10)]
            got = [await next_event(others) for _ in range(201)]
            assert got[-1][:2] == ("b", "end")


async def test_a_slow_subscriber_delays_nobody(direct: str) -> None:
    async with Listener(direct, notify_through=direct) as listener:  # noqa: SIM117
        async with (
            listener.subscribe("a", buffer=5) as slow,
            listener.subscribe("a", buffer=100) as quick,
        ):
            for number in range(20):
                await listener.notify("a", str(number))
            for number in range(20):
                assert (await next_event(quick))[1] == str(number)
            events = [await next_event(slow) for _ in range(6)]
            assert [e[1] for e in events[:5]] == list("01234")
            assert isinstance(events[5], Gap)
            assert events[5].reason == "slow"
            assert listener.statistics()["dropped"] == 15


@pytest.mark.parametrize("kind", ["url", "url with options", "none"])
async def test_a_pooler_in_transaction_mode_is_refused(
    direct: str, bouncer: str, kind: str
) -> None:
    # The pooler itself would refuse the options, with an error that names no cause.
    url = f"{bouncer}?options=-c%20geqo%3Doff" if kind == "url with options" else bouncer
    with pytest.raises(PoolerRefused, match=r"transaction mode.*NOTIFY_URL.*5432"):
        async with Listener(url, notify_through=None if kind == "none" else url):
            pass


async def test_an_optional_listener_turns_itself_off_behind_a_pooler(
    bouncer: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(bouncer, optional=True)
    with pytest.raises(ConfigurationError, match=r"notify_url \(NOTIFY_URL\)"):
        await listener.open()
    assert listener.machine.at("off")
    assert "set notify_url" in caplog.text
    assert "does not retry" in listener.explain()


async def test_a_pooler_in_session_mode_is_a_warning(
    direct: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = "pool_mode = session"
    with pgbouncer(require_server("pgbouncer"), direct, settings=settings) as url:
        async with Listener(url) as listener, listener.subscribe("a") as events:
            await run_sql(direct, "notify a, 'x'")
            assert (await next_event(events))[:2] == ("a", "x")
            assert listener.statistics()["pooler"]
    assert "session mode" in caplog.text


async def test_paths_to_different_databases_are_refused(
    direct: str, postgres: SyncEmbeddedPostgres
) -> None:
    with pytest.raises(ConfigurationError, match="different servers or databases"):
        async with Listener(direct, notify_through=postgres.url_of("template1")):
            pass


async def test_a_wrong_password_is_refused(direct: str, postgres: SyncEmbeddedPostgres) -> None:
    wrong = direct.replace(postgres.password, "wrong")
    with pytest.raises(ConfigurationError, match="password"):
        async with Listener(wrong):
            pass


async def test_an_outage_of_the_pooler_does_not_touch_notifications(direct: str) -> None:
    with pgbouncer(require_server("pgbouncer"), direct) as url:
        listener = Listener(direct, notify_through=url, heartbeat=0.2, canary_every=0.2)
        await listener.open()
    # The pooler is gone now.
    try:
        async with listener.subscribe("a") as events:
            await listener.monitor.wait_until(
                lambda _: not listener.monitor.conditions()["canary"].met, LIMIT
            )
            await run_sql(direct, "notify a, 'x'")
            assert (await next_event(events))[:2] == ("a", "x")
            assert listener.up
            assert "the pooled path does not work" in listener.explain()
    finally:
        await listener.close()


async def test_no_canary_is_sent_while_the_pooled_path_is_closed_on_purpose(direct: str) -> None:
    listener, waiting = Listener(direct, notify_through=direct, canary_every=0.05), True
    listener.stands_by = lambda: waiting

    def canary() -> Condition:
        return listener.monitor.conditions()["canary"]

    async with listener:
        await listener.monitor.wait_until(lambda _: bool(canary().detail), LIMIT)
        assert not canary().met
        assert "no canary is sent while this instance stands by" in listener.explain()
        waiting = False
        await listener.monitor.wait_until(lambda _: canary().met, LIMIT)


async def test_a_lost_canary_ends_the_connection(direct: str, bouncer: str) -> None:
    options: dict[str, Any] = {"heartbeat": 0.2, "canary_every": 0.1}
    async with Listener(direct, notify_through=bouncer, **options) as listener:
        channel = listener._canary.channel
        listener._canary.channel = "moored_canary_of_nobody"
        await listener.monitor.wait_until(lambda _: not listener.up, LIMIT)
        listener._canary.channel = channel
        await listener.wait_until_up(LIMIT)
        assert listener.statistics()["canaries_lost"] >= 1


async def test_a_server_that_is_down_at_the_start_is_waited_for(unused_tcp_port: int) -> None:
    url = f"postgresql://postgres@127.0.0.1:{unused_tcp_port}/x"
    async with Listener(url) as listener:
        assert not listener.up
        assert listener.health is Health.STARTING
        async with listener.subscribe("a") as events:
            assert events.gap is not None
        assert "connection refused" in listener.explain().lower()
        with pytest.raises(WaitTimeout, match="listening"):
            await listener.wait_until_up(0.05)


async def test_a_channel_that_the_database_cannot_encode_ends_only_its_subscription(
    postgres: SyncEmbeddedPostgres,
) -> None:
    name = "latin1_of_listener"
    encoding = "encoding latin1 locale 'C' template template0"
    await run_sql(postgres.url, f"create database {name} {encoding}")
    url = postgres.url_of(name)
    async with Listener(url, notify_through=url) as listener, listener.subscribe("é") as events:
        async with listener.subscribe("a", "☃") as refused:
            with pytest.raises(NotifyRefused, match=r"refuses '☃': .*LATIN1"):
                await next_event(refused)
        async with listener.subscribe("b") as later:
            for channel, each in (("é", events), ("b", later)):
                await listener.notify(channel, "1")
                assert (await next_event(each))[:2] == (channel, "1")
        assert listener.statistics()["generation"] == 1, "the connection was not lost"
    await run_sql(postgres.url, f"drop database {name} with (force)")


async def test_subscribers_end_when_the_listener_is_closed(direct: str) -> None:
    listener = Listener(direct, application_name="closed")
    await listener.open()
    async with listener.subscribe("a") as events:
        waiting = asyncio.create_task(anext(events, None))
        await asyncio.sleep(0)
        await listener.close()
        assert await asyncio.wait_for(waiting, LIMIT) is None
    with pytest.raises(PostgresError, match="not open"):
        async with listener.subscribe("a"):
            pass
    await until(lambda: _none_left(direct))


async def _none_left(url: str) -> bool:
    return not await listener_pids(url, "closed")


async def test_a_flood_is_read_although_nobody_consumes_it(direct: str) -> None:
    async with Listener(direct) as listener, listener.subscribe("a", buffer=10) as events:
        await run_sql(
            direct, "select pg_notify('a', n || repeat('x', 7000)) from generate_series(1, 3000) n"
        )

        async def read() -> bool:
            return bool(listener.statistics()["dropped"] + len(events) >= 3000)

        await until(read)
        assert (await run_sql(direct, "select pg_notification_queue_usage() < 0.001"))[0][0]


async def test_a_queue_that_fills_up_is_a_warning(
    direct: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([b"0.05", b"0.12", b"0.3", b"0.6"])
    async with Listener(direct) as listener:

        class Full:
            async def query(self, sql: str) -> bytes:
                return next(answers)

        for _ in range(4):
            await listener._query_usage(Full())  # type: ignore[arg-type]
        assert "full" in listener.explain()
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "queue" in r.message]
    assert [r.message.split(" %")[0].rsplit(" ", 1)[1] for r in warned] == ["12", "60"]


def test_the_connection_requires_a_primary_and_has_keepalives() -> None:
    made = direct_conninfo("postgresql://u@h/d?target_session_attrs=any", "moored listener")
    for part in (
        "target_session_attrs=read-write",
        "keepalives_idle=5",
        "keepalives_interval=1",
        "keepalives_count=3",
        "tcp_user_timeout=8000",
        "connect_timeout=3",
    ):
        assert part in made


async def test_all_work_on_a_pooler_of_two_connections_and_every_event_is_delivered(
    direct: str, bouncer: str
) -> None:
    """Queries, COPY, a migration and a refreshed view by the pooled path, all at the same time."""
    async with (
        AsyncConnectionPool(bouncer, kwargs=PLAIN, max_size=6) as pool,
        Listener(direct, notify_through=pool) as listener,
        listener.subscribe("work", buffer=10_000) as events,
    ):
        async with pool.connection() as conn:
            await conn.execute("create table work (id int, worker int)")
            await conn.execute("create materialized view sums as select count(*) n from work")

        async def worker(name: int) -> None:
            for number in range(10):
                async with pool.connection() as conn:
                    cursor = conn.cursor()
                    async with cursor.copy("copy work (id, worker) from stdin") as copy:
                        await copy.write_row((number, name))
                    await conn.execute(
                        "select pg_notify('work', %s)", [f"{name} {number}"], prepare=False
                    )
                async with pool.connection() as conn:
                    await conn.execute("refresh materialized view sums")

        async def migrate() -> None:
            async with pool.connection() as conn:
                await conn.execute("alter table work add column note text")

        await asyncio.gather(*map(worker, range(5)), migrate())
        got = [(await next_event(events))[1] for _ in range(50)]
        assert sorted(got) == sorted(f"{a} {b}" for a in range(5) for b in range(10))
        async with pool.connection() as conn:
            assert await (await conn.execute("select n from sums")).fetchone() == (50,)


async def test_the_usage_of_a_small_queue_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A transaction that listens holds the queue; PostgreSQL 17 and later can limit its size."""
    small = SyncEmbeddedPostgres(options={"max_notify_queue_pages": "64"})
    with small:
        assert small.version is not None
        if int(small.version.split(".")[0]) < 17:
            pytest.skip("max_notify_queue_pages needs PostgreSQL 17")
        async with (
            Listener(small.url, heartbeat=0.1) as listener,
            await psycopg.AsyncConnection.connect(small.url, autocommit=True) as idle,
        ):
            await idle.execute("listen a")
            await idle.execute("begin")
            fill = "select pg_notify('a', n || repeat('x', 4000)) from generate_series(1, 70) n"
            await run_sql(small.url, fill)

            async def noticed() -> bool:
                return bool((listener.statistics()["queue_usage"] or 0.0) >= 0.5)

            await until(noticed)
            assert listener.up
    assert "every NOTIFY of the cluster fails" in caplog.text
