"""SQLAlchemy's engines on a reservoir, with a real server: by threads, and by asyncio with both
drivers."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import Connection, NullPool, QueuePool, StaticPool, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from tests.reservoir.engines import WAYS, Desk, SteppedClock, Way, backends, left, unseen
from tests.reservoir.harness import until

from moored import leases
from moored.reservoir import ReservoirConfig
from moored.reservoir.sqlalchemy import create_async_engine, create_engine, reservoir_of
from moored.testing import scaled, stress_threads


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str]


# -- what users do ---------------------------------------------------------------------------------


async def test_a_session_commits_and_rolls_back(way: Way, postgres_url: str) -> None:
    async with Desk(way, postgres_url, pool_size=2, max_overflow=0) as desk:
        await desk.run(Base.metadata.create_all)

        def add(session: Session, *numbers: int) -> None:
            for number in numbers:
                session.add(Order(id=number, article="tea"))
                session.flush()

        async def order(*numbers: int) -> None:
            if isinstance(desk.engine, AsyncEngine):
                async with AsyncSession(desk.engine) as session, session.begin():
                    await session.run_sync(add, *numbers)
            else:
                with Session(desk.engine) as blocking, blocking.begin():
                    add(blocking, *numbers)

        await order(1)
        with pytest.raises(IntegrityError):
            await order(2, 1)
        await order(3)
        assert await desk.ask("select array_agg(id order by id) from orders") == [1, 3]
        assert desk.now.discards == {}


async def test_many_threads(postgres_url: str) -> None:
    engine = create_engine(postgres_url, pool_size=2, max_overflow=2)
    with engine.begin() as conn:
        conn.execute(text("create table log (n int)"))
    most = 0

    def worker(thread: int, iteration: int) -> None:
        with engine.begin() as conn:
            conn.execute(text("insert into log values (:n)"), {"n": thread})

    def always() -> None:
        nonlocal most
        most = max(most, reservoir_of(engine)._core.size)

    threads, iterations = 8, scaled(200, least=10)
    stress_threads(worker, threads=threads, iterations=iterations, always=always)
    with engine.connect() as conn:
        assert conn.scalar(text("select count(*) from log")) == threads * iterations
    assert most <= 4
    assert reservoir_of(engine).statistics().discards == {}
    engine.dispose()
    await left(postgres_url)


@pytest.mark.parametrize("way", ["psycopg", "asyncpg"])
async def test_many_tasks(way: Way, postgres_url: str) -> None:
    tasks, each = 20, scaled(50, least=5)
    async with Desk(way, postgres_url, pool_size=2, max_overflow=2) as desk:
        await desk.run(lambda conn: conn.execute(text("create table log (n int)")))

        async def work() -> None:
            for number in range(each):
                insert = text(f"insert into log values ({number})")
                await desk.run(lambda conn, insert=insert: conn.execute(insert))  # type: ignore[misc]

        await asyncio.gather(*(work() for _ in range(tasks)))
        assert await desk.ask("select count(*) from log") == tasks * each
        assert len(backends(postgres_url)) <= 4
        assert desk.now.discards == {}


async def test_dispose_leaves_nothing_behind_and_the_engine_works_again(
    way: Way, postgres_url: str
) -> None:
    async with Desk(way, postgres_url, pool_size=2, max_overflow=1) as desk:
        first = await desk.ask()
        await until(lambda: desk.full, "it is full")
        assert len(backends(postgres_url)) == 3
        before = desk.pool
        await desk.dispose()
        await left(postgres_url)
        # It is new, and opened by its first use alone.
        assert desk.pool is not before
        assert (desk.pool.reservoir.state, desk.pool.name) == ("new", before.name)
        second = await desk.ask()
        assert second != first
        assert desk.pool.reservoir.state == "open"
    await left(postgres_url)


async def test_a_connection_in_use_at_dispose_is_closed_at_the_return(
    way: Way, postgres_url: str
) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=1) as desk:
        held = await desk.take()
        pid = await held.ask()
        await desk.dispose()
        await left(postgres_url, pid)
        assert await held.ask() == pid
        # Meanwhile the engine has other connections, of another reservoir.
        assert await desk.ask() != pid
        await held.close()
        await until(lambda: pid not in backends(postgres_url), "the old one is gone")
        assert desk.now.discards == {}


async def test_overflow_connections_are_returned_to_the_reservoir(
    way: Way, postgres_url: str
) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=2) as desk:
        held = await desk.take_all(3)
        pids = {await one.ask() for one in held}
        for one in held:
            await one.close()
        assert (desk.now.size, desk.now.in_use, desk.now.discards) == (3, 0, {})
        again = await desk.take_all(3)
        assert {await one.ask() for one in again} == pids == backends(postgres_url)
        for one in again:
            await one.close()
        assert desk.now.refills == 3


async def test_a_detached_connection_counts_until_it_is_closed_with_its_session(
    way: Way, postgres_url: str
) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0) as desk:

        def detach(conn: Connection) -> Any:
            conn.detach()
            conn.execute(text("set time zone 'Asia/Tokyo'"))
            conn.scalar(text("select pg_advisory_lock(1)"))
            assert (desk.now.in_use, desk.now.size) == (1, 0)
            return conn.scalar(text("select pg_backend_pid()"))

        pid = await desk.run(detach)
        assert await desk.ask() != pid
        assert await desk.ask("show time zone") != "Asia/Tokyo"
        assert await desk.ask("select pg_try_advisory_lock(1)"), "its lock is released"
        assert sum(desk.now.discards.values()) == 1


async def test_nullpool_as_poolclass_also_uses_the_reservoir(way: Way, postgres_url: str) -> None:
    config = ReservoirConfig(max_size=1)
    async with Desk(way, postgres_url, poolclass=NullPool, config=config) as desk:
        seen = []
        event.listen(desk.sync_engine, "checkout", lambda dbapi, *_: seen.append(dbapi))
        pids = {await desk.ask() for _ in range(5)}
        assert pids == backends(postgres_url)
        await until(lambda: desk.now.size == 1, "it is ready again")
        assert desk.now.discards == {}
        # The same object each time, prepared once: SQLAlchemy's adapter keeps its statements, and
        # handlers do not pile up.
        assert len(set(map(id, seen))) == 1
        driver = desk.sync_engine.dialect.get_driver_connection(seen[0])
        assert len(getattr(driver, "_notice_handlers", [1])) == 1


# -- settings --------------------------------------------------------------------------------------


def test_sqlalchemy_does_not_manage_lifetimes() -> None:
    engine = create_engine("postgresql://db/orders")
    assert engine.pool._recycle == -1
    engine = create_engine("postgresql://db/orders", pool_recycle=-1)
    assert engine.pool._recycle == -1
    with pytest.raises(ValueError, match="the reservoir manages the lifetime of connections"):
        create_engine("postgresql://db/orders", pool_recycle=1800)
    with pytest.raises(ValueError, match=r"create_async_engine: pool_recycle=0: .*max_lifetime"):
        create_async_engine("postgresql://db/orders", pool_recycle=0)


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"creator": psycopg.connect}, "creator: not supported, because the reservoir opens"),
        ({"pool": object()}, "pool: not supported"),
        ({"poolclass": StaticPool}, "poolclass=StaticPool: must be QueuePool or NullPool"),
        ({"max_overflow": -1}, "a reservoir needs one"),
        ({"pool_size": 0, "pool_recycle": 5}, "pool_recycle=5: .*; pool_size=0"),
        ({"max_size": 5}, "Invalid argument"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], mistake: str) -> None:
    with pytest.raises((ValueError, TypeError), match=mistake):
        create_engine("postgresql://db/orders", **options)


@pytest.mark.parametrize("name", ["postgresql+asyncpg", "postgresql+psycopg2", "sqlite"])
def test_unsupported_drivers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"use postgresql\+psycopg://…"):
        create_engine(f"{name}://db/orders")
    if "asyncpg" not in name:
        with pytest.raises(ValueError, match=r"use postgresql\+asyncpg://… or postgresql\+psyc"):
            create_async_engine(f"{name}://db/orders")


def test_sizes() -> None:
    def sizes(**options: Any) -> int:
        engine = create_engine("postgresql://db/orders", **options)
        assert engine.pool.size() == reservoir_of(engine).max_size  # type: ignore[attr-defined]
        return reservoir_of(engine).max_size

    assert sizes() == 15
    assert sizes(pool_size=3, max_overflow=2, poolclass=QueuePool) == 5
    # What is said to SQLAlchemy counts; if nothing is, the settings of the reservoir do.
    assert sizes(config=ReservoirConfig(max_size=7)) == 7
    assert sizes(config=ReservoirConfig(max_size=7), pool_size=2) == 12
    with pytest.raises(ValueError, match="target_ready=7 must be between 0 and max_size=3"):
        sizes(config=ReservoirConfig(target_ready=7), pool_size=3, max_overflow=0)
    engine = create_engine("postgresql://db/orders", poolclass=NullPool)
    assert reservoir_of(engine).max_size == 15


def test_reservoir_of_returns_the_pool_of_an_engine() -> None:
    engine = create_engine("postgresql://app:secret@db:5433/orders", max_lifetime=100, name="shop")
    pool = reservoir_of(engine)
    assert repr(pool) == "<ConnectionPool db:5433/orders: new>"
    assert (pool.name, pool.config.base_lifetime) == ("shop", 95)
    # An engine with other options of execution shares it.
    assert reservoir_of(engine.execution_options(isolation_level="AUTOCOMMIT")) is pool
    with pytest.raises(ValueError, match=r"has no reservoir: create it with .*\.create_engine"):
        reservoir_of(sqlalchemy.create_engine("postgresql+psycopg://db/orders"))


async def test_connections_are_opened_with_url_and_connect_args(
    way: Way, postgres_url: str
) -> None:
    named = {"server_settings": {"application_name": "shop"}}
    args = named if way == "asyncpg" else {"application_name": "shop"}
    if way == "asyncpg":
        args["prepared_statement_cache_size"] = 7  # type: ignore[assignment]
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0, connect_args=args) as desk:
        assert await desk.ask("show application_name") == "shop"
        if way == "asyncpg":
            held = await desk.take()
            assert isinstance(held.conn, AsyncConnection)
            adapter: Any = (await held.conn.get_raw_connection()).dbapi_connection
            assert adapter._prepared_statement_cache.capacity == 7
            await held.close()


async def test_a_do_connect_listener_changes_the_parameters(way: Way, postgres_url: str) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0) as desk:

        @event.listens_for(desk.sync_engine, "do_connect")
        def name(dialect: Any, record: Any, args: Any, parameters: dict[str, Any]) -> None:
            options = {"application_name": "listener"}
            parameters.update({"server_settings": options} if way == "asyncpg" else options)

        assert await desk.ask("show application_name") == "listener"


async def test_tokens_replace_the_password_of_the_url(way: Way, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        role = f"app_{way}"
        admin.execute(f"drop role if exists {role}")
        admin.execute(f"create role {role} login password 'one'")
        vault = ["one"]
        url = sqlalchemy.make_url(postgres_url).set(username=role, password="wrong")
        text_url = url.render_as_string(hide_password=False)
        async with Desk(
            way, text_url, tokens=lambda: vault[-1], pool_size=1, max_overflow=0
        ) as desk:
            assert await desk.ask("select current_user") == role
            admin.execute(f"alter role {role} password 'two'")
            vault.append("two")
            drained = desk.pool.drain()
            if drained is not None:
                await drained
            assert await desk.ask("select current_user") == role
        admin.execute(f"drop role {role}")


async def test_hstore_found_after_the_connect_is_registered(postgres_url: str) -> None:
    """SQLAlchemy looks for hstore with its first connection; the reservoir has more by then."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("create domain hstore as text")  # as far as a driver can see
    async with Desk("threads", postgres_url, pool_size=2, max_overflow=0) as desk:
        pool = reservoir_of(desk.sync_engine)
        await asyncio.to_thread(pool.open, wait=True)
        held = await desk.take_all(2)
        for one in held:
            assert isinstance(one.conn, Connection)
            found = one.conn.exec_driver_sql("select %t::text", ({"tea": "green"},))
            assert found.scalar() == '"tea"=>"green"'
            await one.close()
        assert desk.now.refills == 2


# -- time ------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_before_it_expires(
    way: Way, postgres_url: str, clock: SteppedClock
) -> None:
    config = unseen(max_size=1, base_lifetime=1000.0, guard_window=400.0, scan_every=0.05)
    async with Desk(way, postgres_url, config=config, clock=clock) as desk:
        first = await desk.ask()
        clock.ahead += 601.0
        await until(lambda: desk.now.discards, "the scanner has looked")
        assert desk.now.discards == {"guard_on_scan": 1}
        await until(lambda: first not in backends(postgres_url), "the server knows it")
        assert await desk.ask() != first


async def test_no_caller_gets_a_connection_in_its_guard_window(
    way: Way, postgres_url: str, clock: SteppedClock
) -> None:
    config = unseen(max_size=1, base_lifetime=100.0, guard_window=40.0)
    async with Desk(way, postgres_url, config=config, clock=clock, check_idle=None) as desk:
        first = await desk.ask()
        clock.ahead += 59.0
        assert await desk.ask() == first
        clock.ahead += 2.0
        second = await desk.ask()
        assert second != first
        assert desk.now.discards == {"guard_on_checkout": 1}
        clock.ahead += 101.0
        assert await desk.ask() not in (first, second)
        assert desk.now.discards == {"guard_on_checkout": 1, "expired_on_checkout": 1}


async def test_a_connection_returned_in_its_guard_window_is_not_kept(
    way: Way, postgres_url: str, clock: SteppedClock
) -> None:
    config = unseen(max_size=1, base_lifetime=100.0, guard_window=40.0)
    async with Desk(way, postgres_url, config=config, clock=clock) as desk:
        held = await desk.take()
        first = await held.ask()
        clock.ahead += 61.0
        assert await held.ask() == first
        await held.close()
        await until(lambda: desk.now.discards, "it has gone back")
        assert desk.now.discards == {"guard_on_return": 1}
        assert await desk.ask() != first


async def test_an_idle_connection_whose_lease_is_lost_is_closed(
    way: Way, postgres_url: str
) -> None:
    store = f"memory://sqlalchemy-{way}"
    config = ReservoirConfig(
        max_size=1, lease_enabled=True, lease_url=store, lease_limit=1, lease_ttl=4.5
    )
    async with Desk(way, postgres_url, config=config) as desk, leases.connect(store) as operator:
        first = await desk.ask()
        (lease,) = await operator.held()
        assert await operator.revoke(lease.id, lease.key)
        await until(lambda: desk.now.discards == {"lease_lost": 1}, "the holder has learnt of it")
        assert await desk.ask() != first
        assert desk.now.leases_held == 1
    async with leases.connect(store) as operator:
        assert await operator.held() == []
