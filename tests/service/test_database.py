"""The connection manager as a part of the service, over a real PostgreSQL and a proxy."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.http_client import http_client
from tests.service.support import own_stream

from moored.embedded import EmbeddedPostgres
from moored.kernel import MooredError
from moored.postgres import Changes, Postgres, Transaction
from moored.postgres.consume import _backpressure
from moored.postgres.manage import _manager_core, _stack
from moored.postgres.stream import _replication
from moored.service import Config, DatabaseUnreachable, Service, _database, _shown_postgres
from moored.service._listen import listen
from moored.service._logs import Logs
from moored.testing import FaultProxy

LIMIT = 60.0
Reading = TypeVar("Reading")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of the manager."""
    monkeypatch.setattr(_stack, "BACKOFF", (0.05, 0.5))
    monkeypatch.setattr(_manager_core, "CHECK_EVERY", 0.2)
    monkeypatch.setattr(_replication, "SILENCE", 1.5)
    monkeypatch.setattr(_database, "CONNECT_TIMEOUT", 0.5)


class Asked:
    """A running service, and its responses."""

    def __init__(self, service: Service, said: list[str], client: httpx.AsyncClient) -> None:
        self.service = service
        self.said = said
        self.client = client

    async def health(self) -> tuple[int, dict[str, Any]]:
        answer = await self.client.get("/v1/health")
        return answer.status_code, answer.json()

    async def stream(self) -> dict[str, Any]:
        """Return the stream in `/v1/status`."""
        async with asyncio.timeout(LIMIT):
            while True:  # it is there as soon as there is a manager
                state = (await self.client.get("/v1/status")).json()
                if "postgres" in state:
                    found: dict[str, Any] = state["postgres"]
                    return found
                await asyncio.sleep(0.02)

    async def explain(self) -> list[str]:
        """Return the text of `/v1/explain/postgres`."""
        answer = (await self.client.get("/v1/explain/postgres")).json()
        return str(answer["explanation"]).splitlines()

    async def until(self, *words: str) -> None:
        """Wait until the health is one of these states."""
        await self.service.monitor.wait_until(lambda now: now in words, LIMIT)

    @property
    def pg(self) -> Postgres:
        found = self.service.view.systems["moored/postgres/manager"]
        assert isinstance(found, Postgres)
        return found

    def not_ready(self) -> str:
        return str(self.service.monitor.conditions()["postgres_ready"].detail)


@asynccontextmanager
async def service(
    url: str, tmp_path: Path, *, stream: str | None = None, wait: float = LIMIT, **more: Any
) -> AsyncIterator[Asked]:
    config = Config(
        port=0,
        database_url=url,
        database_wait=wait,
        stream_id=stream or own_stream()["MOORED_STREAM_ID"],
        pool_size=2,
        **{"state_dir": tmp_path, "no_token": not more.get("admin_token"), **more},
    )
    said: list[str] = []
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in listen(config.host, 0)]
        async with (
            Service(config, sockets, say=said.append) as started,
            http_client(started.view.address) as client,
        ):
            yield Asked(started, said, client)


def behind(proxy: FaultProxy, url: str) -> str:
    """Return the URL of the database through the proxy."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    return parts._replace(netloc=f"{login}@{proxy.host}:{proxy.port}").geturl()


def front(url: str) -> FaultProxy:
    parts = urlsplit(url)
    return FaultProxy(parts.hostname or "", parts.port)


async def told(pg: Postgres, name: str, times: int = 1) -> None:
    """Wait until an event was recorded this many more times."""
    async with asyncio.timeout(LIMIT):
        async for event in pg.events():
            times -= event.name == name
            if times <= 0:
                return


def states_down_to_the_manager(tree: dict[str, Any]) -> list[str]:
    """Return the states of the nodes from the root to the one that owns the connections."""
    states = [tree["state"]]
    for name in ("postgres", "manager", "connection", "manager", "manager"):
        (tree,) = (child for child in tree["children"] if child["name"] == name)
        states.append(tree["state"])
    return states


# -- lost and found ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["reset", "black_hole", pytest.param("stall", marks=pytest.mark.soak)]
)
async def test_a_database_that_is_lost_or_falls_silent_is_noticed_and_found_again(
    postgres_url: str, fault: str, tmp_path: Path
) -> None:
    async with (
        front(postgres_url) as proxy,
        service(behind(proxy, postgres_url), tmp_path) as it,
    ):
        await it.until("active")
        assert it.not_ready().startswith("PostgreSQL 18.")
        getattr(proxy, fault)()
        await it.until("waiting", "starting")
        assert (await it.health())[0] in (200, 202)  # after a reset it may be back already
        proxy.heal()
        await it.until("active")
        assert it.not_ready().startswith("PostgreSQL 18.")
        assert [machine.name for machine in it.service.view.machines] == ["postgres"]
        assert any(said.startswith("not ready: postgres_ready is lost: ") for said in it.said)
        assert it.said[-1] == "ready again"


async def test_an_outage_is_one_line_in_the_log_and_its_end_another(
    postgres_url: str, tmp_path: Path
) -> None:
    stream = io.StringIO()
    logs = Logs(layout="text", level="info", stream=stream)
    try:
        async with (
            front(postgres_url) as proxy,
            service(behind(proxy, postgres_url), tmp_path) as it,
        ):
            it.service.recorder.subscribe(logs.sink)
            await it.until("active")
            stream.truncate(0)
            lost = asyncio.create_task(told(it.pg, "connection_error"))
            await asyncio.sleep(0)
            proxy.reset()
            await lost
            await it.until("active")
            # A pool tells of a connection that was in use by itself, and the service of its outage.
            lines = [
                line
                for line in stream.getvalue().strip("\0").splitlines()
                if "came back broken" not in line and "outage 1" not in line
            ]
            notice = next(said for said in it.said if said.startswith("not ready: "))
    finally:
        logs.close()
    assert len(lines) == 2, lines
    assert "the stream was lost: the connection was closed" in lines[0]
    assert "the stream is back after " in lines[1]
    assert "is lost: starting: the connection was closed (" in notice


async def test_a_database_that_is_never_reached_fails_the_start(
    postgres_url: str, tmp_path: Path
) -> None:
    async with front(postgres_url) as proxy:
        proxy.refuse()
        async with service(behind(proxy, postgres_url), tmp_path, wait=0.3) as it:
            with pytest.raises(
                DatabaseUnreachable, match=r"cannot reach PostgreSQL at 127\.0\.0\.1"
            ):
                await asyncio.wait_for(asyncio.shield(it.service.first_active), LIMIT)
            # The caller of the service stops it; until then it keeps trying.
            proxy.heal()
            await it.until("active")


async def test_a_database_that_is_lost_after_the_start_does_not_end_the_service(
    postgres_url: str, tmp_path: Path
) -> None:
    async with (
        front(postgres_url) as proxy,
        service(behind(proxy, postgres_url), tmp_path) as it,
    ):
        await asyncio.wait_for(asyncio.shield(it.service.first_active), LIMIT)
        failures = asyncio.create_task(told(it.pg, "connection_error", 3))
        await asyncio.sleep(0)
        proxy.refuse()
        proxy.reset()
        await failures
        assert it.service.monitor.status() in ("waiting", "starting")
        state = (await it.client.get("/v1/status")).json()
        assert "running" not in states_down_to_the_manager(state["tree"])
        assert it.service.first_active.exception() is None
        assert not it.service.failed.done()
        proxy.heal()
        await it.until("active")


async def test_the_service_closes_all_its_connections(postgres_url: str, tmp_path: Path) -> None:
    async with front(postgres_url) as proxy:
        async with service(behind(proxy, postgres_url), tmp_path) as it:
            await it.until("active")
            async with asyncio.timeout(LIMIT):
                # The stream, and one of each pool; the trial at the start has ended.
                await proxy.wait_until(lambda now: now.open == 3)
        async with asyncio.timeout(LIMIT):
            await proxy.wait_until(lambda now: now.open == 0)


async def test_a_silent_server_does_not_hold_up_the_stop(postgres_url: str, tmp_path: Path) -> None:
    async with front(postgres_url) as proxy:
        async with service(behind(proxy, postgres_url), tmp_path) as it:
            await it.until("active")
            proxy.black_hole()
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < LIMIT
        abandoned = [e for e in it.service.recorder.events() if e.kind == "abandoned"]
        assert abandoned == []


# -- what only a person can mend -----------------------------------------------------------------


async def failure(it: Asked) -> str:
    """Wait for the error that ends the service, and return its text."""
    with pytest.raises(MooredError) as caught:
        await asyncio.wait_for(asyncio.shield(it.service.failed), LIMIT)
    return str(caught.value)


async def test_a_wrong_password_is_explained(postgres_url: str, tmp_path: Path) -> None:
    parts = urlsplit(postgres_url)
    url = parts._replace(netloc=f"postgres:wr0ng@{parts.hostname}:{parts.port}").geturl()
    async with service(url, tmp_path) as it:
        text = await failure(it)
        assert "password authentication failed" in text
        assert "percent-encoded" in text
        assert "wr0ng" not in text + str(await it.stream())


async def test_a_server_without_logical_replication_is_503_and_names_what_to_change(
    tmp_path: Path,
) -> None:
    async with (
        EmbeddedPostgres(options={"wal_level": "replica"}) as server,
        service(server.url, tmp_path) as it,
    ):
        text = await failure(it)
        assert "set wal_level = logical" in text
        code, body = await it.health()
        assert (code, body["status"], body["parts"]["postgres"]) == (503, "failed", "failed")
        now = await it.stream()
        assert now["fatal"] == text
        assert (await it.explain())[1] == f"  because  {text}"


async def test_a_user_that_may_not_replicate_is_503_too(
    postgres_url: str, postgres: Any, tmp_path: Path
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create role plain_user login password 'plain'")
    try:
        parts = urlsplit(postgres_url)
        url = parts._replace(netloc=f"plain_user:plain@{parts.hostname}:{parts.port}").geturl()
        async with service(url, tmp_path) as it:
            assert "WITH REPLICATION" in await failure(it)
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as conn:
            conn.execute("drop role plain_user")


async def test_an_unusable_state_directory_is_reported(postgres_url: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    async with service(postgres_url, tmp_path, state_dir=taken / "below") as it:
        text = await failure(it)
        assert str(taken / "below") in text
        assert "state_dir" in text


# -- the states of health ------------------------------------------------------------------------


async def test_a_second_instance_waits_and_names_the_lock_holder(
    postgres_url: str, tmp_path: Path
) -> None:
    stream = own_stream()["MOORED_STREAM_ID"]
    async with service(postgres_url, tmp_path / "1", stream=stream) as first:
        await first.until("active")
        async with service(postgres_url, tmp_path / "2", stream=stream) as second:
            waiting = await _eventually(second.stream, lambda now: now["lock"]["holder"])
            holder = waiting["lock"]["holder"]
            server = (await first.stream())["server"]
            assert holder["pid"] == server["backend_pid"]
            assert holder["application"] == "moored"
            assert holder["streaming"] is True
            code, body = await second.health()
            assert (code, body["status"]) == (202, "waiting")
            assert (await second.client.get("/v1/health?ready")).status_code == 200
            assert "standing by for another instance: postgres" in second.service.view.sentence()
            head, who, what, so = await second.explain()
            standby = f'standby of backend {holder["pid"]} (application "moored", from 127.0.0.1, '
            assert head.startswith(f"waiting: {standby}")
            assert standby in "".join(second.service.view.reasons("postgres"))
            assert who.startswith(
                f"  because  the lock of moored_slot_{stream} is held by backend {holder['pid']} "
                '(application "moored", from 127.0.0.1, for '
            )
            assert what == "  because  another instance is active: its slot is streaming"
            assert so == (
                "  so       connections, outbox and listener work here, and changes are streamed "
                f"there; this instance takes over when backend {holder['pid']} releases the lock. "
                "To stream in parallel, choose another stream_id"
            )
            assert second.pg.listener is not None
            assert not second.pg.listener.stands_by()
            assert any("standing by" in said and str(holder["pid"]) in said for said in second.said)
            await first.pg.close()  # as the end of the other process would
            await second.until("active")
            assert (await second.stream())["lock"] == {"held": True, "holder": None}
            assert not second.pg.listener.stands_by()
            assert f"PostgreSQL: taking over the stream from backend {holder['pid']}" in second.said
            assert second.service.truth.incidents() == [], "a take-over is no outage"


@pytest.mark.parametrize(
    ("token", "query"),
    # Without a token, everybody can read it.
    [(None, ""), ("t0ken", "create table pending (id int)")],
)
async def test_a_slot_that_cannot_be_created_names_the_blocking_backend(
    postgres_url: str, tmp_path: Path, token: str | None, query: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as blocker:
        pid = blocker.info.backend_pid
        await blocker.execute("create table pending (id int)")  # and no commit
        async with service(postgres_url, tmp_path, admin_token=token) as it:
            it.client.headers["Authorization"] = f"Bearer {token}"
            # Each reading is one of another moment: the manager may connect again in between.
            now = await _eventually(
                it.stream, lambda now: [each["pid"] for each in now["slot_blockers"]] == [pid]
            )
            (found,) = now["slot_blockers"]
            assert found["age"] > 0
            assert found["query"] == query
            await _eventually(
                it.health, lambda now: (now[0], now[1]["status"]) == (202, "starting")
            )
            because = f"  because  the new slot waits for a transaction of backend {pid}, open "
            lines = await _eventually(it.explain, lambda now: now[1].startswith(because))
            assert lines[-1].endswith(f"SELECT pg_terminate_backend({pid})")
            await blocker.rollback()
            await it.until("active")
            assert (await it.stream())["slot_blockers"] == []


async def test_a_sleeping_service_is_200_and_has_no_connections(
    postgres_url: str, tmp_path: Path
) -> None:
    async with front(postgres_url) as proxy, service(behind(proxy, postgres_url), tmp_path) as it:
        await it.until("active")
        await it.pg.sleep()
        code, body = await it.health()
        assert (code, body["status"]) == (200, "sleeping")
        assert it.said[-1].startswith("sleeping now: ")
        async with asyncio.timeout(LIMIT):
            await proxy.wait_until(lambda now: now.open == 0)
        now = await it.stream()
        assert (now["conn"], now["pools"], now["lag"]) == ("sleeping", {}, None)
        assert (await it.explain())[0].startswith("sleeping: ")
        await it.pg.wake()
        await it.until("active")


async def test_connections_are_closed_after_sleep_after_seconds_without_use(
    postgres_url: str, tmp_path: Path
) -> None:
    async with service(postgres_url, tmp_path, sleep_after=0.5) as it:
        await it.until("sleeping")
        assert (await it.health())[0] == 200


async def test_a_consumer_that_stops_reading_makes_the_service_degraded_until_it_reads_again(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backpressure, "STALLED_AFTER", 0.2)
    async with service(postgres_url, tmp_path) as it:
        await it.until("active")
        changes = await _streams(it, postgres_url)
        it.pg._hub.pressure.queue_length = 0
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn:
            await conn.execute("insert into proof values (2)")
        await it.until("degraded")
        code, body = await it.health()
        assert (code, body["parts"]["postgres"]) == (200, "degraded")
        assert it.said[-1].startswith("degraded now: reading is paused")
        await anext(changes)
        await it.until("active")
        assert (await it.health())[1]["parts"]["postgres"] == "active"


async def test_a_lost_pooler_is_200_degraded_while_the_stream_works(
    postgres_url: str, tmp_path: Path
) -> None:
    """The pools' database URL leads through the proxy, as through a pooler; the stream does not."""
    async with (
        front(postgres_url) as pooler,
        service(behind(pooler, postgres_url), tmp_path, replication_url=postgres_url) as it,
    ):
        await it.until("active")
        pooler.refuse()
        pooler.reset()
        await it.until("degraded")
        code, body = await it.health()
        assert (code, body["parts"]) == (200, {"postgres": "degraded", "http": "active"})
        await _streams(it, postgres_url)
        assert it.service.monitor.status() == "degraded"
        now = await it.stream()
        assert now["pools"]["snapshot"]["state"] == "repopulating"
        assert now["pools"]["admin"]["state"] == "ready"
        lines = await it.explain()
        assert lines[1].startswith("  because  the snapshot pool has 0 of 1 connections")
        pooler.heal()
        await it.until("active")
        assert it.said[-1].startswith("active now: ")


async def _streams(it: Asked, url: str) -> Changes:
    """Check that a commit arrives; return the consumer."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute("create table proof (id int primary key)")
        changes = it.pg.changes("proof", tables=["proof"])
        async with asyncio.timeout(LIMIT):
            while not await _published(conn):  # noqa: ASYNC110 - nothing here tells when
                await asyncio.sleep(0.02)
            await conn.execute("insert into proof values (1)")
            item = await anext(changes)
            assert isinstance(item, Transaction)
            await item.ack()
    return changes


async def _published(conn: psycopg.AsyncConnection[Any]) -> bool:
    found = await conn.execute("select 1 from pg_publication_tables where tablename = 'proof'")
    return await found.fetchone() is not None


async def _eventually(
    read: Callable[[], Awaitable[Reading]], holds: Callable[[Reading], object]
) -> Reading:
    """Poll until what is read satisfies the predicate; return it."""
    async with asyncio.timeout(LIMIT):
        while not holds(now := await read()):  # noqa: ASYNC110 - nothing here tells when
            await asyncio.sleep(0.02)
    return now


# -- status and metrics --------------------------------------------------------------------------


async def test_the_status_contains_the_statistics(postgres_url: str, tmp_path: Path) -> None:
    async with service(postgres_url, tmp_path) as it:
        await it.until("active")
        over_http, here = await it.stream(), it.pg.statistics()
        assert set(over_http) == set(here)
        for name in ("stream_id", "conn", "shape", "consumers", "events", "server"):
            assert over_http[name] == here[name], name
        assert over_http["slot"]["name"] == here["slot"]["name"]
        assert list(over_http["conditions"]) == list(it.pg.monitor.conditions())
        tree = (await it.client.get("/v1/status")).json()["tree"]
        manager = tree["children"][0]["children"][0]
        assert [child["name"] for child in manager["children"]] == ["connection"]


async def test_the_metrics_include_those_of_the_stream(postgres_url: str, tmp_path: Path) -> None:
    async with service(postgres_url, tmp_path) as it:
        await it.until("active")
        consumer = await _streams(it, postgres_url)
        text = (await it.client.get("/metrics")).text
        found = {
            (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "stream"))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.value == 1
        }
    assert ("moored_postgres_health", "active") in found
    assert ("moored_postgres_condition_met", "pg_lock_acquired") in found
    assert ("moored_postgres_transactions_total",) in found
    assert ("moored_postgres_pool_connections", "snapshot") in found
    assert ("moored_postgres_consumer_attached", consumer.name) in found
    assert ("moored_health", "active", "postgres") in found


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://app:pw@db/orders", "db:5432/orders"),
        ("postgresql://app@db:6000", "db:6000/app"),
        ("postgresql://a:1,b:2/o", "a:1,b:2/o"),
        ("host=a,b port=7 dbname=o", "a:7,b:7/o"),
        ("host=/run/postgresql", "run/postgresql:5432"),
        ("host=::1 dbname=o", "[::1]:5432/o"),
        ("dbname=o", "localhost:5432/o"),
    ],
)
def test_a_place_is_short_and_has_no_secrets(url: str, place: str) -> None:
    assert _shown_postgres.place_of(url) == place
