"""An app runs its parts in order, shows them, and survives what happens to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from prometheus_client.core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.routing import Mount
from tests.rpc.servers import EchoServer

import moored
from moored.app import App, AppError, ComponentContext
from moored.broker import ApiKeys, LiveEvent, MemorySource, SourceEvent, SourceGap
from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Backoff
from moored.postgres import Health, Outbox, Reset, Transaction
from moored.rpc import ChannelError, ConnectFailed
from moored.service import Config, Part, ServiceError
from moored.testing import AppLeaked, running_app
from moored.testing.demo import Demo, DemoServer

#: Seconds within which everything here happens, on a busy machine too.
LIMIT = 60.0


def new(**settings: Any) -> App:
    """Return an app that ignores the environment."""
    return App("orders", config=Config(**(settings or {"no_token": True})))


def with_part(**settings: Any) -> App:
    """Return an app with a component that does nothing."""
    app = new(**settings)

    @app.component
    async def idle(ctx: ComponentContext) -> None:
        await asyncio.Event().wait()

    return app


@asynccontextmanager
async def client(app: App) -> AsyncIterator[httpx.AsyncClient]:
    """Ask a running app over its ASGI interface."""
    transport = httpx.ASGITransport(app=app.asgi)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
        yield asking


async def until(app: App, status: str) -> None:
    """Wait for a health of the app."""
    async with asyncio.timeout(LIMIT):
        await app._running().monitor.wait_until(lambda now: now == status)


# -- order -------------------------------------------------------------------------------------


async def test_parts_start_in_order_and_stop_in_reverse() -> None:
    app, seen = new(), []

    def add(name: str) -> None:
        @app.component(name=name)
        async def run(ctx: ComponentContext) -> None:
            seen.append(f"{name} starts")
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(f"{name} stops")

    for name in ("first", "second", "third"):
        add(name)
    async with app:
        await app.ready(LIMIT)
    assert seen == [
        *("first starts", "second starts", "third starts"),
        *("third stops", "second stops", "first stops"),
    ]


async def test_a_part_waits_for_the_parts_that_it_comes_after() -> None:
    app, gate, seen = new(), asyncio.Event(), []

    @app.component
    async def slow(ctx: ComponentContext) -> None:
        ctx.health("starting", "it loads")
        await gate.wait()
        seen.append("slow is ready")
        ctx.health("active")
        await asyncio.Event().wait()

    @app.component(after=["slow"])
    async def later(ctx: ComponentContext) -> None:
        seen.append("later")
        await asyncio.Event().wait()

    @app.component
    async def other(ctx: ComponentContext) -> None:
        seen.append("other")
        await asyncio.Event().wait()

    async with app:
        await asyncio.sleep(0)
        assert seen == ["other"]
        assert "waits for slow" in app.explain("later")
        gate.set()
        await app.ready(LIMIT)
        assert seen == ["other", "slow is ready", "later"]


async def test_an_app_that_stands_by_is_ready_and_starts_the_parts_after_it() -> None:
    app, free, seen = new(), asyncio.Event(), []

    @app.component
    async def stream(ctx: ComponentContext) -> None:
        ctx.health("waiting", "another instance has the lock")
        await free.wait()
        ctx.health("active")
        await asyncio.Event().wait()

    @app.component(after=["stream"])
    async def later(ctx: ComponentContext) -> None:
        seen.append("later")
        await asyncio.Event().wait()

    async with app, client(app) as asking:
        await app.ready(LIMIT)
        await asyncio.sleep(0)
        health = await asking.get("/v1/health")
        parts = {"stream": "waiting", "later": "active"}
        assert (health.status_code, health.json()["parts"]) == (202, parts)
        assert (await asking.get("/v1/health?ready")).status_code == 200
        assert "standing by for another instance: stream" in app._running().view.sentence()
        assert seen == ["later"]
        free.set()
        await until(app, "active")


async def test_a_component_that_runs_once_is_ready_when_it_has_returned() -> None:
    app, gate, seen = new(), asyncio.Event(), []

    @app.component(once=True)
    async def migrate(ctx: ComponentContext) -> None:
        await gate.wait()
        seen.append("migrated")

    @app.component(after=["migrate"])
    async def work(ctx: ComponentContext) -> None:
        seen.append("works")
        await asyncio.Event().wait()

    async with app:
        await asyncio.sleep(0)
        assert app.status == "starting"
        assert seen == []
        gate.set()
        await app.ready(LIMIT)
        assert seen == ["migrated", "works"]


# -- health ------------------------------------------------------------------------------------


async def test_a_part_that_fails_is_started_again_and_health_says_why() -> None:
    app, broken = new(), asyncio.Event()

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        if ctx.generation == 1:
            await broken.wait()
            raise OSError("the file is gone")
        await asyncio.Event().wait()

    async with app, client(app) as asking:
        await app.ready(LIMIT)
        assert (await asking.get("/v1/health")).status_code == 200
        broken.set()
        await until(app, "starting")
        answer = await asking.get("/v1/health")
        assert (answer.status_code, answer.json()["parts"]) == (202, {"importer": "starting"})
        assert "the file is gone" in app.explain("importer")
        await app.ready(LIMIT)
        # What happened stays known after the recovery.
        assert "  restarts 1: the file is gone (OSError)\n" in app.explain("importer")
        assert "importer failed for" in app.explain("importer")
        assert "the file is gone" in app.explain("importer")


async def test_a_component_that_fails_at_each_start_is_never_ready_between() -> None:
    app, broken, failed, seen = new(), asyncio.Event(), asyncio.Event(), list[str]()

    @app.component
    async def flaky(ctx: ComponentContext) -> None:
        await broken.wait()
        for _ in range(3):  # so that it has begun
            await asyncio.sleep(0)
        raise ConnectionError(f"refused {ctx.generation} times")

    async with app:
        await app.ready(LIMIT)
        app._running().monitor.subscribe(lambda change: seen.append(change.status))
        app.recorder.subscribe(lambda event: failed.set() if "3rd restart" in event.text else None)
        broken.set()
        await asyncio.wait_for(failed.wait(), LIMIT)
        assert set(seen) == {"starting"}
        head, because, restarts, again, *_ = app.explain("flaky").splitlines()
        assert head.startswith("down for ")
        assert because == "  because  refused 3 times (ConnectionError)"
        assert restarts == "  restarts 3"
        assert again.startswith("  so       it starts again in ")


async def test_an_app_is_degraded_without_an_optional_part() -> None:
    app = new()

    @app.component(required=False)
    async def extra(ctx: ComponentContext) -> None:
        ctx.health("failed", "its licence has expired")
        await asyncio.Event().wait()

    async with app, client(app) as asking:
        await until(app, "degraded")
        answer = await asking.get("/v1/health")
        assert (answer.status_code, answer.json()["parts"]) == (200, {"extra": "failed"})


async def test_an_optional_part_that_fails_for_good_does_not_fail_the_app(
    postgres_url: str, tmp_path: Path
) -> None:
    app, storage = new(), tmp_path / "file" / "below"
    (tmp_path / "file").write_text("")
    pg = app.postgres(f"{postgres_url}_missing", state_dir=tmp_path, required=False)
    app.sessions(storage=str(storage), required=False)

    @app.component
    async def slow(ctx: ComponentContext) -> None:
        ctx.health("starting", "the others fail first")
        await app._running().monitor.wait_until(
            lambda _: app._running().view.parts()["postgres"] == "failed"
        )
        ctx.health("active")
        await asyncio.Event().wait()

    async with app, client(app) as asking:
        await app.ready(LIMIT)
        assert pg.fatal is not None
        answers = [await asking.get(f"/v1/health?{each}") for each in ("ready", "started")]
        assert [each.status_code for each in answers] == [200, 200]
        assert answers[0].json()["parts"] == {
            "postgres": "failed",
            "sessions": "failed",
            "slow": "active",
        }
        assert "does not exist" in app.explain("postgres")
        assert "file/below" in app.explain("sessions")


async def test_a_component_shows_its_machine_its_numbers_and_its_metrics() -> None:
    app = new()

    class Rows:
        def collect(self) -> list[GaugeMetricFamily]:
            return [GaugeMetricFamily("importer_rows", "Rows.", value=42)]

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        ctx.show(lambda: {"rows": 42}, lambda: "it has imported 42 rows")
        ctx.metrics(Rows())
        ctx.record("the file was found")
        await asyncio.Event().wait()

    async with app, client(app) as asking:
        await app.ready(LIMIT)
        status = (await asking.get("/v1/status")).json()
        assert status["importer"] == {"rows": 42}
        assert "the file was found" in [each["text"] for each in status["events"]]
        assert app.explain("importer").startswith("it has imported 42 rows")
        assert "importer_rows 42.0" in (await asking.get("/metrics")).text


async def test_a_component_that_returns_is_finished_and_healthy() -> None:
    app = new()

    @app.component
    async def migrate(ctx: ComponentContext) -> None:
        return None

    async with app:
        await app.ready(LIMIT)
        assert "finished" in str(app.tree())


# -- systems -----------------------------------------------------------------------------------


async def test_pool_stream_broker_and_consumer_meet_in_one_app(
    postgres_url: str, tmp_path: Any
) -> None:
    app = new()
    db = app.pool(postgres_url, name="db", min_size=1, max_size=3)
    pg = app.postgres(postgres_url, state_dir=tmp_path, stream_id="app")
    source = MemorySource()
    live = app.broker(source, channels=["orders"])
    accounts = app.sessions(storage="memory:")
    seen: asyncio.Queue[Transaction | Reset] = asyncio.Queue()

    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key)")

    @app.consumer(pg, "search", tables=["orders"], required=True)
    async def index(txn: Transaction | Reset) -> None:
        await seen.put(txn)

    async with app, client(app) as asking, asyncio.timeout(LIMIT):
        await app.ready()
        async with db.connection() as conn:
            await conn.execute("insert into orders values (1)")
        while isinstance(txn := await seen.get(), Reset):
            pass
        assert [change.new and change.new["id"] for change in txn] == [1]
        await accounts.connect("ann", Demo(DemoServer()), offline=True)
        status = (await asking.get("/v1/status")).json()
        assert {"db", "postgres", "broker", "sessions", "consumer-search"} <= status.keys()
        assert set(status["parts"].values()) == {"active"}
        metrics = (await asking.get("/metrics")).text
        for family in ("reservoir_size", "postgres_", "broker_subscribers", "sessions"):
            assert f"moored_{family}" in metrics, family
        assert 'moored_links{name="demo",state="up",system="sessions"} 1.0' in metrics
        for part in ("db", "postgres", "broker", "sessions"):
            assert app.explain(part), part
        consumer = app.explain("consumer-search").splitlines()
        assert consumer[0].startswith("works for ")
        assert consumer[1].startswith("  because  handled 1 transaction and ")
        # The first start of a source is no failure.
        assert "failure" not in {each.kind for each in app.recorder.events("broker")}
        assert "orders/postgres/manager/connection" in [p for p, _ in app.tree().paths()]
        assert live.up
        assert len(accounts) == 1
    assert db.closed


async def test_a_consumer_is_ready_when_its_tables_are_published(
    postgres_url: str, tmp_path: Any
) -> None:
    app, seen = new(), asyncio.Queue[Transaction | Reset]()
    pg = app.postgres(postgres_url, state_dir=tmp_path, stream_id="app")
    app.consumer(pg, "search", tables=["orders"], after="postgres")(seen.put)

    @app.component(after=["consumer-search"])
    async def writer(ctx: ComponentContext) -> None:
        async with pg.connection() as conn:
            await conn.execute("insert into orders values (1)")

    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key)")
        conn.execute("begin; lock table orders in exclusive mode")
        async with app, asyncio.timeout(LIMIT):
            monitor, why = app._running().monitor, "starting: its tables are not published yet"
            await monitor.wait_until(
                lambda _: monitor.conditions()["consumer-search_ready"].detail == why
            )
            assert pg.health is Health.ACTIVE
            conn.execute("commit")
            while isinstance(txn := await seen.get(), Reset):
                pass
            assert [change.new and change.new["id"] for change in txn] == [1]


async def test_of_two_apps_on_one_database_both_serve_and_one_consumes(
    postgres_url: str, tmp_path: Any
) -> None:
    """What needs no lock works in both; the consumer of the other one says why it waits."""

    def made(name: str) -> tuple[App, asyncio.Future[int]]:
        app, found = new(), asyncio.get_running_loop().create_future()
        pg = app.postgres(postgres_url, state_dir=tmp_path / name, stream_id="two")

        @app.consumer(pg, "search", tables=["orders"])
        async def index(item: Transaction | Reset) -> None: ...

        @app.component(after=["postgres"])
        async def query(ctx: ComponentContext) -> None:
            async with pg.connection() as conn:
                row = await (await conn.execute("select 7")).fetchone()
            assert row is not None
            found.set_result(row[0])
            await asyncio.Event().wait()

        return app, found

    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key)")
    (first, one), (second, other) = made("first"), made("second")
    async with first, asyncio.timeout(LIMIT):
        await until(first, "active")
        assert await one == 7
        async with second:
            await second.ready()
            assert await other == 7
            assert second.status == "waiting"
            assert "standby of backend" in second.explain("postgres")
            assert "another instance has the change stream" in second.explain("consumer-search")


async def test_a_consumer_that_fails_is_ready_when_it_has_handled_the_transaction(
    postgres_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.app._component.PROVEN", 0.0)
    app, states, calls = new(), list[str](), 0
    pg = app.postgres(postgres_url, state_dir=tmp_path, stream_id="app")
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key)")

    @app.consumer(pg, "search", tables=["orders"], required=True)
    async def index(txn: Transaction | Reset) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.05)
        states.append(app._running().view.parts()["consumer-search"])
        if calls < 3:
            raise OSError("search is down")

    async with app, asyncio.timeout(LIMIT):
        await app.ready()
        async with pg.connection() as writing:
            await writing.execute("insert into orders values (1)")
        await until(app, "starting")
        await app.ready()
        assert states == ["active", "starting", "starting"]
        assert "handled 1 transaction" in app.explain("consumer-search")


async def test_a_broker_reads_the_outbox_of_a_pool(postgres_url: str) -> None:
    app = new()
    db = app.pool(postgres_url, name="db", min_size=1, max_size=3)
    outbox = Outbox(db, install=True)
    live = app.broker(outbox, canonical=str)
    async with running_app(app, timeout=LIMIT), asyncio.timeout(LIMIT):
        # An app is ready before its broker, which is an optional part.
        await app._running().monitor.wait_until(lambda _: live.up)
        async with live.subscribe("acme") as events:
            async with db.connection() as conn:
                await outbox.publish(conn, "orders", {"id": 1}, tenant="acme")
            while not isinstance(event := await anext(events), LiveEvent):
                pass
    assert json.loads(event.payload) == {"id": 1}


async def test_a_pool_whose_server_is_killed_is_seen_and_comes_back() -> None:
    with SyncEmbeddedPostgres() as server:
        app = new()
        db = app.pool(server.url, name="db", min_size=2, max_size=2, check_idle=0.1)
        async with app:
            await app.ready(LIMIT)
            await asyncio.to_thread(server.kill)
            monitor = app._running().monitor
            async with asyncio.timeout(LIMIT):
                await monitor.wait_until(
                    lambda now: "connecting fails" in str(monitor.conditions()["db_ready"].detail)
                )
            assert app.status == "starting"
            await asyncio.to_thread(server.start)
            await app.ready(LIMIT)
            async with db.connection(timeout=LIMIT) as conn:
                assert await (await conn.execute("select 1")).fetchone() == (1,)


async def test_a_channel_outlives_its_server() -> None:
    server = EchoServer()
    app = new()
    channel = app.channel(f"127.0.0.1:{server.port}", name="vectors")
    # A stub may be made before the app has started.
    echo = channel.unary_unary("/test.Echo/Echo")
    with pytest.raises(ChannelError, match="its app does not run"):
        echo(b"early")
    try:
        async with app, client(app) as asking, asyncio.timeout(LIMIT):
            await until(app, "starting")
            waiting = asyncio.ensure_future(echo(b"first", timeout=LIMIT))
            await asyncio.to_thread(server.start)
            assert await waiting == b"first"
            await app.ready()
            assert "generation 1 is connected" in app.explain("vectors")
            await asyncio.to_thread(server.kill)
            await until(app, "starting")
            sentence = (await asking.get("/v1/status")).json()["sentence"]
            assert sentence.startswith("gRPC server cannot be reached: ")
            assert sentence.endswith(" Waiting for it: vectors.")
            await asyncio.to_thread(server.start)
            assert await echo(b"again", timeout=LIMIT) == b"again"
            await app.ready()
            status = (await asking.get("/v1/status")).json()
            assert status["vectors"]["generation"] >= 2
            assert "moored_rpc_" in (await asking.get("/metrics")).text
    finally:
        await asyncio.to_thread(server.kill)
    with pytest.raises(ChannelError, match="its app does not run"):
        echo(b"late")


async def test_call_that_fails_before_the_first_connection_leaves_the_channel_usable(
    tmp_path: Path,
) -> None:
    """The first failed call must not close the channel of the app, which calls again later."""
    server, app = EchoServer(), new()
    options: dict[str, Any] = {"tls": True, "ca": tmp_path / "missing.pem"}
    echo = app.channel(server.address, name="vectors").unary_unary("/test.Echo/Echo")
    secret = app.channel(server.address, name="secret", **options).unary_unary("/test.Echo/Echo")
    try:
        async with app, asyncio.timeout(LIMIT):
            with pytest.raises(ConnectFailed, match="not sent: waited"):
                await echo(b"early", timeout=0.1)
            for _ in range(2):
                with pytest.raises(ConnectFailed, match="option ca"):
                    await secret(b"", timeout=LIMIT)
            await asyncio.to_thread(server.start)
            assert await echo(b"later", timeout=LIMIT) == b"later"
    finally:
        await asyncio.to_thread(server.kill)


# -- inside other programs ---------------------------------------------------------------------


async def test_it_is_mounted_in_another_app_at_any_path() -> None:
    app = with_part()
    outer = Starlette(routes=[Mount("/ops", app.asgi)], lifespan=app.lifespan)
    transport = httpx.ASGITransport(app=outer)
    base = "http://localhost"
    async with httpx.AsyncClient(transport=transport, base_url=base) as asking:
        early = await asking.get("/ops/v1/health")
        assert early.status_code == 503
        live = await asking.get("/ops/v1/health?live")
        parts = {"idle": "starting"}
        body = {"status": "starting", "parts": parts, "degraded": ["idle"]}
        assert (live.status_code, live.json(), early.json()) == (200, body, body)
        assert (await asking.get("/ops/v1/health?ready")).status_code == 503
        async with outer.router.lifespan_context(outer):
            assert (await asking.get("/ops/v1/health")).status_code == 200
            page = await asking.get("/ops", follow_redirects=True)
            assert page.url.path == "/ops/"
            assert 'src="static/page.js"' in page.text
            assert (await asking.get("/ops/static/page.js")).status_code == 200


async def test_the_token_also_protects_a_mounted_app() -> None:
    app = with_part(admin_token="a-token-of-twenty-characters")
    outer = Starlette(routes=[Mount("/ops", app.asgi)], lifespan=app.lifespan)
    async with (
        outer.router.lifespan_context(outer),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=outer), base_url="http://localhost"
        ) as asking,
    ):
        assert (await asking.get("/ops/v1/health")).status_code == 200
        assert (await asking.get("/ops/v1/status")).status_code == 401
        login = await asking.get("/ops/", headers={"Accept": "text/html"})
        assert "admin token" in login.text
        form = {"token": "a-token-of-twenty-characters"}
        done = await asking.post("/ops/login", data=form)
        assert (done.status_code, done.headers["location"]) == (303, "./")
        assert (await asking.get("/ops/v1/status")).status_code == 200


# -- mistakes ----------------------------------------------------------------------------------


async def test_no_part_may_have_a_name_of_the_status() -> None:
    app = with_part()
    async with app:
        keys = set(app._running().view.as_dict()) - {"idle"}
    for name in (*keys, "http"):
        with pytest.raises(AppError, match=f"the name '{name}' of a part is taken"):
            with_part().add(Part(name, lambda wiring: ()))


async def test_only_one_broker_is_served_by_the_app() -> None:
    app, keys = new(), ApiKeys({"key": "acme"})
    app.broker(MemorySource(), channels=["a"], name="first", authenticate=keys)
    app.broker(MemorySource(), channels=["a"], name="not served")
    with pytest.raises(AppError, match=r"second would serve /v1/subscribe.* too: leave out authen"):
        app.broker(MemorySource(), channels=["a"], name="second", authenticate=keys)


async def test_waiting_for_an_app_that_can_never_be_ready_ends_at_once(
    postgres_url: str, tmp_path: Any
) -> None:
    app = new()
    app.postgres(postgres_url + "_which_does_not_exist", state_dir=tmp_path)
    async with app:
        with pytest.raises(ServiceError, match="does not exist"):
            await app.ready()


def test_mistakes_are_refused_when_they_are_made() -> None:
    app = new()
    app.pool("postgresql://localhost/x")
    with pytest.raises(AppError, match=r"the name 'pool' of a part is taken"):
        app.pool("postgresql://localhost/y")
    with pytest.raises(AppError, match=r"after='nothing' names no part .*; those are: pool"):
        app.pool("postgresql://localhost/y", name="late", after=["nothing"])
    with pytest.raises(TypeError, match="'x' is no source of events"):
        app.broker("x")
    with pytest.raises(AppError, match="has not been started"):
        app.tree()
    with pytest.raises(AppError, match="must not be empty or contain '/'"):
        App("a/b")


def test_a_function_that_is_not_async_is_refused() -> None:
    app = new()

    def importer(ctx: ComponentContext) -> None: ...

    with pytest.raises(TypeError, match=r"importer.*is not a coroutine function: define it with"):
        app.component(importer)  # type: ignore[arg-type]
    with pytest.raises(AppError, match="has no name: give the component one with name="):
        app.component(lambda ctx: asyncio.sleep(0))


def test_a_consumer_of_a_stream_that_the_app_does_not_open_is_refused(tmp_path: Any) -> None:
    pg = App("other", config=Config()).postgres("postgresql://localhost/x", state_dir=tmp_path)
    with pytest.raises(AppError, match=r"'search' follows a Postgres that is not a part of .*orde"):
        new().consumer(pg, "search")
    with pytest.raises(AppError, match="not a part of the app orders"):
        new().consumer(Outbox(pg), "search")


@pytest.mark.parametrize(
    "url",
    ["postgres//localhost/x", "http://localhost/x", "orders", "port=a b", "postgresql://h:x/db"],
)
def test_a_malformed_url_is_refused_when_it_is_given(url: str) -> None:
    with pytest.raises(AppError, match="the URL of db is wrong: "):
        new().pool(url, name="db")
    with pytest.raises(AppError, match="the URL of pg is wrong: "):
        new().postgres(url, name="pg")


async def test_an_unknown_health_is_refused_with_the_known_ones() -> None:
    app, raised = new(), asyncio.get_running_loop().create_future()

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        try:
            ctx.health("ok")  # type: ignore[arg-type]
        except ValueError as error:
            raised.set_result(str(error))
        await asyncio.Event().wait()

    async with app:
        assert "'ok' is no health: report active, sleeping, " in await raised


def test_an_app_without_parts_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert new(port=0).run() == 2
    assert "the app orders has no parts: add one, such as app.pool(…)" in capsys.readouterr().err


async def test_an_app_is_started_once() -> None:
    app = with_part()
    async with app:
        with pytest.raises(AppError, match="cannot be added"):
            app.pool("postgresql://localhost/y")
    with pytest.raises(AppError, match=r"was started before.*create the app .* in a function"):
        async with app:
            pass


async def test_an_error_of_a_part_at_the_start_is_raised_with_its_reason(tmp_path: Any) -> None:
    app = new()
    app.postgres("postgresql://localhost/x", state_dir=tmp_path / "file" / "below")
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="the state of the stream cannot be stored"):
        async with app:
            pass


async def test_a_part_that_cannot_start_after_another_one_logs_the_reason(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = with_part()
    (tmp_path / "file").write_text("")
    app.sessions(storage=str(tmp_path / "file" / "below"), after=["idle"])
    async with app:
        await until(app, "failed")
        (line,) = (each.getMessage() for each in caplog.records if each.levelname == "ERROR")
        assert line.startswith("sessions cannot start: ")
        assert "file/below" in line


def test_the_app_is_part_of_the_package() -> None:
    assert moored.App is App


# -- in tests ----------------------------------------------------------------------------------


async def test_an_app_that_leaves_a_task_behind_fails_its_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moored.testing._app.SETTLE", 0.1)
    app, left = new(), []

    @app.component
    async def careless(ctx: ComponentContext) -> None:
        left.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))
        await asyncio.Event().wait()

    with pytest.raises(AppLeaked, match="orders has stopped and left the task forgotten"):
        async with running_app(app):
            pass
    left[0].cancel()


async def test_a_broker_whose_source_has_not_begun_leaves_nothing_behind() -> None:
    class Silent(MemorySource):
        async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
            await asyncio.Event().wait()
            yield SourceGap("never")

    app = with_part()
    app.broker(Silent(), channels=["a"])
    async with running_app(app):
        pass


async def test_a_pool_leaves_nothing_behind(postgres_url: str) -> None:
    app = new()
    db = app.pool(postgres_url, max_size=2)
    async with running_app(app), db.connection() as conn:
        assert await (await conn.execute("select 1")).fetchone() == (1,)


async def test_an_app_that_is_cancelled_while_it_starts_closes_its_pool(
    postgres_url: str,
) -> None:
    for turns in range(20):
        app = new()
        pool = app.pool(postgres_url, max_size=2)
        starting = asyncio.create_task(app.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        assert pool.closed


async def test_lost_sessions_are_explained_after_they_are_back() -> None:
    app, server = new(), DemoServer()
    accounts = app.sessions(name="chat", backoff=Backoff(0.01, 0.01))

    async def online(*profiles: str) -> None:
        for profile in profiles:
            await accounts.via(profile).connect(LIMIT)

    async def outages(number: int) -> list[dict[str, Any]]:
        assert app.service is not None
        async with asyncio.timeout(LIMIT):
            while True:
                found = app.service.truth.incidents()
                if len(found) == number and found[0]["ended"] is not None:
                    return found
                await asyncio.sleep(0.05)

    async with running_app(app, timeout=LIMIT):
        for profile in "abcd":
            await accounts.connect(profile, Demo(server), timeout=LIMIT)
        server.cut()  # back before the next look at their health
        (incident,) = await outages(1)
        assert [state for _, _, state in incident["parts"]["chat"]] == ["degraded"]
        assert "4 links lost: the peer has aborted the connection" in incident["why"]
        await online(*"abcd")
        assert "lost     4 links" in app.explain("chat")
        assert "offline: the peer has aborted" in app.explain("chat/a")

        server.take_over("b")  # one of four: not an incident of the part
        await until_offline(accounts.via("b"))
        await online("b")
        assert "1 link" in app.explain("chat")
        assert "connected from elsewhere" in app.explain("chat")
        assert "offline: connected from elsewhere" in app.explain("chat/b")
        assert len(await outages(1)) == 1


async def until_offline(session: Any) -> None:
    async with asyncio.timeout(LIMIT):
        while session.state != "offline/refused":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_state_of_an_app_does_not_grow_with_its_sessions() -> None:
    app = new()
    accounts = app.sessions()
    async with running_app(app, timeout=LIMIT):
        assert app.service is not None
        sizes = []
        for number in range(100):
            await accounts.start(f"account-{number}", Demo(DemoServer()), offline=True)
            if number in (9, 99):
                state = app.service.view.as_dict()
                state["events"] = []
                sizes.append(len(json.dumps(state, default=str)))
        assert sizes[1] < sizes[0] * 1.1
        assert "95 more" in str(app.tree())
        assert app.tree().children[0].children[0].children[-1].since > 0
        with pytest.raises(AppError, match="no one component 'typo'; there are sessions"):
            app.explain("typo")
