"""The Postgres store with a killed or silent server, and the translation of errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import psycopg
import pytest
from psycopg import sql
from tests.leases.conformance import request
from tests.leases.on_postgres.support import PATIENCE, Database, recovered, refusal, rows, swept
from tests.leases.scale import thorough
from tests.silent_server import silent_server

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Clock
from moored.leases import LeaseError, StoreMisconfigured, StoreUnavailable
from moored.leases._postgres._errors import translate
from moored.leases.postgres import PostgresStore, grants
from moored.leases.postgres import open_store as open_postgres
from moored.testing.proxy import FaultProxy


@pytest.mark.parametrize("fault", thorough(["black_hole"], ["stall", "black_hole"]))
async def test_a_silent_server_raises_within_the_timeout(
    far_store: PostgresStore, proxy: FaultProxy, fault: str
) -> None:
    getattr(proxy, fault)()
    for _ in range(2):  # first on a connection that was open, then on a new one
        begin = time.monotonic()
        calls = [far_store.acquire(request(limit=99)) for _ in range(10)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 10
        assert time.monotonic() - begin < 3 * PATIENCE
        await asyncio.sleep(0.2)  # longer than it dares not to try again
    proxy.heal()
    assert await recovered(far_store)


async def test_a_cancelled_call_ends_at_once(
    proxy: FaultProxy, postgres: SyncEmbeddedPostgres, postgres_url: str
) -> None:
    url = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
    store = open_postgres(f"{url}?timeout=60", clock=Clock.current())
    await store.open()
    proxy.black_hole()
    call = asyncio.ensure_future(store.acquire(request()))
    await asyncio.sleep(0.1)
    begin = time.monotonic()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # The driver itself would wait for the server's consent, and the store for its timeout.
    assert time.monotonic() - begin < 30
    await store.close()


async def test_a_cancelled_connect_closes_its_socket_at_once() -> None:
    async with silent_server() as server, asyncio.timeout(30):
        url = f"postgresql://x@127.0.0.1:{server.port}/x"
        store = open_postgres(url, clock=Clock.current())
        call = asyncio.create_task(store.acquire(request()))
        await server.arrived.wait()
        call.cancel()
        await asyncio.wait({call})
        await server.gone.wait()
        await store.close()


async def test_a_connection_reset_is_reported_at_once(
    far_store: PostgresStore, proxy: FaultProxy
) -> None:
    proxy.stall()
    call = asyncio.ensure_future(far_store.acquire(request()))
    await asyncio.sleep(0.05)
    proxy.reset()
    with pytest.raises(StoreUnavailable):
        await call
    proxy.heal()
    assert await recovered(far_store)


async def test_a_late_response_is_not_taken_for_another(
    far_store: PostgresStore, proxy: FaultProxy
) -> None:
    proxy.latency(0.2)
    calls = [asyncio.ensure_future(far_store.acquire(request("db/x", limit=5))) for _ in range(2)]
    await asyncio.sleep(0.3)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    proxy.latency(0.0)
    for n in range(5):
        wanted = request(f"db/{n}")
        grant = await far_store.acquire(wanted)
        assert grant is not None
        assert grant.id == wanted.id


async def test_a_call_takes_one_round_trip(far_store: PostgresStore, proxy: FaultProxy) -> None:
    await far_store.acquire(request("warm"))
    proxy.latency(0.1)
    wanted = request("db")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: far_store.acquire(wanted),
        lambda: far_store.take("db", rate=1.0, burst=1, tokens=1),
        lambda: far_store.release([wanted]),
    ]
    for call in calls:
        # There and back is 0.2 s, except when the machine is busy.
        for _ in range(10):
            begin = time.monotonic()
            await call()
            if (took := time.monotonic() - begin) < 0.4:
                break
        assert 0.2 <= took < 0.4


async def test_an_idle_connection_that_ended_is_replaced_without_an_error(
    store: PostgresStore, database: Database
) -> None:
    await store.acquire(request("db"))
    query = (
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
        "where application_name = 'moored leases' and datname = current_database()"
    )
    assert rows(database, query) == [(True,)]
    assert len(await store.held("db")) == 1


async def test_leases_survive_a_sigkill_of_the_server() -> None:
    server = SyncEmbeddedPostgres()
    await asyncio.to_thread(server.start)
    try:
        store = open_postgres(server.url, clock=Clock.current())
        wanted = request("db")
        grant = await store.acquire(wanted)
        await asyncio.to_thread(server.kill)
        with pytest.raises(StoreUnavailable):
            await store.acquire(request("db"))
        await asyncio.to_thread(server.start)
        assert await recovered(store, limit=1) is None
        assert list(await store.renew([wanted])) == [True]
        await store.release([wanted])
        again = await store.acquire(request("db"))
        assert grant is not None
        assert again is not None
        assert again.fence > grant.fence
        await store.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_failed_sweep_is_logged_and_does_not_fail_the_renewal(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = request("db")
    await store.acquire(wanted)
    late = b"select set_config('statement_timeout', '1', false); select pg_sleep(9)"
    monkeypatch.setattr(store._sql, "sweep", late)
    with caplog.at_level(logging.WARNING, logger="moored.leases"):
        assert list(await store.renew([wanted])) == [True]
        await swept(store)
    assert "could not delete expired rows" in caplog.text


async def test_a_refused_connection_raises_store_unavailable(unused_port: int) -> None:
    error = await refusal(f"postgresql://app@127.0.0.1:{unused_port}/orders")
    assert isinstance(error, StoreUnavailable)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("@127", "-wrong@127"), "password"),
        (("/test_", "/nowhere_"), "does not exist"),
    ],
)
async def test_a_refused_connection_says_why(
    postgres_url: str, change: tuple[str, str], words: str
) -> None:
    error = await refusal(postgres_url.replace(*change))
    assert isinstance(error, StoreMisconfigured)
    assert words in str(error)


async def test_connections_are_replaced_after_a_failover(
    role: str, store: PostgresStore, database: Database
) -> None:
    database.execute(grants(f"app_{database.info.dbname}").encode())
    name = sql.Identifier(f"app_{database.info.dbname}")
    setting = sql.SQL("alter role {} set default_transaction_read_only = {}")
    allowed = open_postgres(role, clock=Clock.current())
    await allowed.open()
    database.execute(setting.format(name, sql.Literal("on")))
    await allowed._link._close_idle()
    with pytest.raises(StoreUnavailable, match="25006"):
        await allowed.acquire(request())
    # The next call is on a connection of its own, which may lead to another server.
    database.execute(setting.format(name, sql.Literal("off")))
    assert await allowed.acquire(request()) is not None
    await allowed.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.errors.AdminShutdown("terminating connection"), StoreUnavailable),
        (psycopg.errors.TooManyConnections("sorry, too many clients"), StoreUnavailable),
        (psycopg.errors.DeadlockDetected("deadlock detected"), StoreUnavailable),
        (psycopg.errors.SerializationFailure("could not serialize"), StoreUnavailable),
        (psycopg.errors.CannotConnectNow("starting up"), StoreUnavailable),
        (psycopg.errors.DiskFull("no space left"), StoreUnavailable),
        (psycopg.errors.UndefinedColumn("no column"), StoreMisconfigured),
        (psycopg.errors.InsufficientPrivilege("permission denied"), StoreMisconfigured),
        (psycopg.OperationalError("server closed the connection"), StoreUnavailable),
        (psycopg.OperationalError('no such database: "x"'), StoreMisconfigured),
        (psycopg.DataError("cannot contain NUL"), StoreMisconfigured),
    ],
)
def test_driver_errors_are_translated(error: Exception, kind: type[LeaseError]) -> None:
    assert type(translate(error, "db/orders")) is kind
