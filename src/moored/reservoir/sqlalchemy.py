"""SQLAlchemy engines whose connections are opened before they are needed.

SQLAlchemy's own pool opens a connection when a caller needs one, and replaces it when it is too
old. The engines of this module are SQLAlchemy's, with its events and settings, but their pool is a
reservoir, which opens connections in advance, at a limited rate, and replaces them one by one
before they expire::

    engine = create_engine("postgresql://app@db/orders", pool_size=20, max_overflow=0)
    with Session(engine) as session:
        session.add(Order(1))
        session.commit()

Invariants:

- waiting callers get a connection in the order of their arrival;
- an idle connection belongs to the reservoir, which closes it when it expires, when its lease is
  lost, or when the server has closed it;
- no caller gets such a connection, or one in its guard window;
- a connection that SQLAlchemy closes (because it is detached, invalidated or broken) counts until
  it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from _thread import get_ident
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from psycopg.types.hstore import register_hstore

from moored.kernel import Tasks, describe, extra, refuse

with extra("sqlalchemy", "moored.reservoir.sqlalchemy"):
    import sqlalchemy
    from sqlalchemy import exc
    from sqlalchemy.dialects import plugins
    from sqlalchemy.engine import URL, CreateEnginePlugin, Engine, make_url
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.ext.asyncio import create_async_engine as sqlalchemy_create_async_engine
    from sqlalchemy.pool import ConnectionPoolEntry, NullPool, QueuePool, base
    from sqlalchemy.util import concurrency

from moored.leases import Leases
from moored.leases import sync as leases_sync

from ._config import ReservoirConfig
from ._driver import PING_TIMEOUT, DriverState
from ._errors import PoolClosed, PoolTimeout, ServerUnreachable
from ._item import Item
from ._pool import Pool
from ._pool_async import AsyncConnectionPool
from ._pool_threads import PATIENCE, ConnectionPool
from ._sqlalchemy_pool import ReservoirPool
from ._tokens import Provider, Tokens

_Record: Any = getattr(base, "_ConnectionRecord", None)
if _Record is None:
    raise ImportError(
        f"SQLAlchemy {sqlalchemy.__version__} has no pool.base._ConnectionRecord, which "
        "moored.reservoir.sqlalchemy needs: install a version that this version of Moored was "
        "tried with"
    )

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect

__all__ = ["EngineTimeout", "create_async_engine", "create_engine", "reservoir_of"]

log = logging.getLogger("moored.reservoir")

P = TypeVar("P", bound=Pool[Any])

#: SQLAlchemy's own defaults.
POOL_SIZE, MAX_OVERFLOW, POOL_TIMEOUT = 5, 10, 30.0
#: The parameters of an engine that are for the reservoir.
SETTINGS = (
    *("config", "tokens", "leases", "creation_rate", "creation_burst", "max_lifetime", "max_idle"),
    *("check_idle", "leak_after", "endpoint", "service", "name", "clock", "recorder"),
)
#: Parameters of SQLAlchemy's adapter of asyncpg, which asyncpg does not know.
ADAPTER = ("prepared_statement_cache_size", "prepared_statement_name_func")
PLUGIN = "moored.reservoir"

# Closes of pools that no caller waits for.
_closing = Tasks()

# The name since SQLAlchemy 2.1, or the former one.
_await: Callable[[Any], Any] = getattr(concurrency, "await_", None) or concurrency.await_only


class EngineTimeout(PoolTimeout, exc.TimeoutError, exc.DontWrapMixin):
    """No connection within `pool_timeout`; a `PoolTimeout` and a `sqlalchemy.exc.TimeoutError`."""


def create_engine(
    url: str | URL,
    *,
    config: ReservoirConfig | None = None,
    tokens: Tokens | Provider | None = None,
    leases: Leases | leases_sync.SyncLeases | str | None = None,
    creation_rate: float | None = None,
    **options: Any,
) -> Engine:
    """Create an engine with a reservoir as its pool; like SQLAlchemy's `create_engine`.

    The engine begins to connect at first use. The maximum number of connections is `pool_size` +
    `max_overflow`, or `config.max_size` if neither is given; a caller waits for a connection for up
    to `pool_timeout`. `engine.dispose()` closes all connections, and the next use opens a new
    reservoir.

    :param url: `postgresql://…` or `postgresql+psycopg://…`.
    :param config: all settings of the reservoir, for example from `ReservoirConfig.from_env`.
    :param tokens: returns passwords that expire, for example `aws.DsqlTokens(…)`.
    :param leases: the URL of a lease store, or a client; limits the connections of the cluster.
    :param creation_rate: how many connections may be opened per second (100).
    :param options: those of SQLAlchemy, and these of `ConnectionPool`:
        `creation_burst`, `max_lifetime`, `max_idle`, `check_idle`, `leak_after`, `endpoint`,
        `service`, `name`, `clock`, `recorder`.
    """
    given = {"config": config, "tokens": tokens, "leases": leases, "creation_rate": creation_rate}
    url, options = _engine_arguments(url, {**options, **given}, "create_engine", _Threads)
    return sqlalchemy.create_engine(url, **options)


def create_async_engine(
    url: str | URL,
    *,
    config: ReservoirConfig | None = None,
    tokens: Tokens | Provider | None = None,
    leases: Leases | leases_sync.SyncLeases | str | None = None,
    creation_rate: float | None = None,
    **options: Any,
) -> AsyncEngine:
    """Create an async engine with a reservoir as its pool; like SQLAlchemy's function.

    The parameters are those of `create_engine`; the URL may also be `postgresql+asyncpg://…`. The
    reservoir runs on the event loop that uses the engine first; close it there with
    `await engine.dispose()`.
    """
    given = {"config": config, "tokens": tokens, "leases": leases, "creation_rate": creation_rate}
    url, options = _engine_arguments(url, {**options, **given}, "create_async_engine", _Asyncio)
    return sqlalchemy_create_async_engine(url, **options)


@overload
def reservoir_of(engine: Engine) -> ConnectionPool[Any]: ...
@overload
def reservoir_of(engine: AsyncEngine) -> AsyncConnectionPool[Any]: ...
def reservoir_of(engine: Engine | AsyncEngine) -> ConnectionPool[Any] | AsyncConnectionPool[Any]:
    """Return the pool of an engine, for example for its statistics, `drain()` or `open(wait=True)`.

    After `dispose()` the engine has another pool.
    """
    dialect = (engine.sync_engine if isinstance(engine, AsyncEngine) else engine).dialect
    source: _Source[Any] | None = getattr(dialect, "moored_source", None)
    if source is None:
        raise ValueError(
            f"{engine!r} has no reservoir: create it with moored.reservoir.sqlalchemy."
            f"{'create_async_engine' if isinstance(engine, AsyncEngine) else 'create_engine'}"
        )
    pool: ConnectionPool[Any] | AsyncConnectionPool[Any] = source.pool
    return pool


# -- creating an engine ----------------------------------------------------------------------------


def _engine_arguments(
    url: str | URL, options: dict[str, Any], subject: str, kind: type[_Source[Any]]
) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the options for SQLAlchemy's own function."""
    url = make_url(url)
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    refuse(subject, [*_wrong_driver(url, kind), *_wrong_options(options)])
    _set_size(settings, options)
    settings["fail_fast"] = True
    settings["timeout"] = options.get("pool_timeout", POOL_TIMEOUT)
    if options.get("pool_pre_ping"):
        settings["check_idle"] = None  # SQLAlchemy pings at every checkout
    source = kind(url, options.pop("connect_args", {}), settings)
    for name in ("pool_size", "max_overflow", "pool_timeout", "pool_use_lifo"):
        options.pop(name, None)
    ours = {"pool_recycle": -1, "creator": source.create, "poolclass": ReservoirPool}
    plugins = [*options.get("plugins", ()), PLUGIN]
    return url, {**options, **ours, "moored_source": source, "plugins": plugins}


def _wrong_driver(url: URL, kind: type[_Source[Any]]) -> Iterator[str]:
    if url.drivername not in kind.drivers:
        known = " or ".join(f"{name}://…" for name in sorted(kind.drivers))
        hint = "; asyncpg needs create_async_engine" if "asyncpg" in url.drivername else ""
        yield f"{url.drivername}://… is not a supported driver: use {known}{hint}"


def _wrong_options(options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("pool_recycle", -1) != -1:
        yield (
            f"pool_recycle={options['pool_recycle']!r}: the reservoir manages the lifetime of "
            "connections; set max_lifetime, or base_lifetime in config"
        )
    for name in ("creator", "async_creator", "pool"):
        if options.get(name) is not None:
            yield f"{name}: not supported, because the reservoir opens the connections; remove it"
    poolclass = options.get("poolclass") or QueuePool
    if not issubclass(poolclass, QueuePool | NullPool):
        yield f"poolclass={poolclass.__name__}: must be QueuePool or NullPool"
    if options.get("pool_size") == 0 or options.get("max_overflow", 0) < 0:
        yield (
            "pool_size=0 or max_overflow=-1 sets no limit, but a reservoir needs one: pass the "
            "maximum number of connections"
        )


def _set_size(settings: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the reservoir's size to that of SQLAlchemy's own pool."""
    if settings.get("config") is None or "pool_size" in options or "max_overflow" in options:
        size = options.get("pool_size", POOL_SIZE) + options.get("max_overflow", MAX_OVERFLOW)
        settings["max_size"] = size


class _Plugin(CreateEnginePlugin):
    """Passes the dialect and the engine to the source while SQLAlchemy creates them."""

    def __init__(self, url: URL, kwargs: dict[str, Any]) -> None:
        self._source: _Source[Any] = kwargs.pop("moored_source")

    def update_url(self, url: URL) -> URL:
        return url

    def handle_pool_kwargs(self, pool_cls: Any, pool_args: dict[str, Any]) -> None:
        self._source.prepare_dialect(pool_args["dialect"])
        pool_args["source"] = self._source

    def engine_created(self, engine: Engine) -> None:
        self._source.attach(engine)


plugins.register(PLUGIN, __name__, "_Plugin")


# -- the connections of an engine ------------------------------------------------------------------


class _Source(ABC, Generic[P]):
    """The source of an engine's connections, to which they are also returned.

    It must not refer to the engine, which would then never be garbage-collected.
    """

    drivers: frozenset[str]

    def __init__(
        self, url: URL, connect_args: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._url = url
        self._connect_args = connect_args
        self._parameters: dict[str, Any] = {}
        self._settings = {**settings, "kwargs": self._options}
        # The current pool, and closed ones that may still have connections in use.
        self._pools: list[P] = [self._new_pool()]
        #: The pool that SQLAlchemy sees, which has the records and the listeners.
        self.keeper: Callable[[], ReservoirPool | None] = lambda: None
        self._settings["name"] = self.pool.name
        # Connections of records that SQLAlchemy is about to initialize, by the id of the record.
        self._arriving: dict[int, tuple[P, Item[Any]] | None] = {}

    @property
    def pool(self) -> P:
        """The current pool."""
        return self._pools[0]

    def prepare_dialect(self, dialect: Dialect) -> None:
        """Replace methods of the engine's dialect before SQLAlchemy calls them."""
        on_connect = dialect.on_connect
        self._do_rollback = dialect.do_rollback
        self._dialect = dialect
        dialect.on_connect = lambda: self._prepare(on_connect())  # type: ignore[method-assign]
        # SQLAlchemy rolls back after an error and when a connection is returned; the drivers' own
        # rollback has no timeout, and would block for minutes if the server has vanished.
        dialect.do_rollback = self._roll_back  # type: ignore[method-assign]
        # Closing never awaits, so the garbage collector may close a connection, too.
        dialect.has_terminate = True
        dialect.moored_source = self  # type: ignore[attr-defined]

    def attach(self, engine: Engine) -> None:
        """Read the engine's connection parameters, and watch for its garbage collection.

        No event listener is added: even one would slow down every statement.
        """
        _, found = self._dialect.create_connect_args(engine.url)
        self._parameters = {**found, **self._connect_args}
        weakref.finalize(engine, self._on_engine_collected).atexit = False

    # -- called by the reservoir ---------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """Return the parameters of a new connection."""
        options = dict(self._parameters)
        for change in self._dialect.dispatch.do_connect:
            if change(self._dialect, None, [], options) is not None:
                raise TypeError(
                    "a do_connect listener returned a connection: it may only change the "
                    "parameters, because the reservoir opens the connections"
                )
        return {name: value for name, value in options.items() if name not in ADAPTER}

    def _place(self) -> str:
        """The server and database, for display; the real parameters are in `_options`."""
        url = self._url
        if not url.host:
            return ""
        place = URL.create("postgresql", host=url.host, port=url.port, database=url.database)
        return place.render_as_string()

    # -- called by SQLAlchemy --------------------------------------------------------------------

    def get(self, pool: ReservoirPool) -> ConnectionPoolEntry:
        """Check out a connection, after waiting for it if need be, and return its record."""
        home, item = self._take()
        record = pool._records.get(id(item.conn))
        if record is None or record.moored_origin[1] is not item:  # type: ignore[attr-defined]
            record = _Record(pool, connect=False)
            record.moored_pool = pool
            self._arriving[id(record)] = home, item
        return record

    def create(self, connection_record: ConnectionPoolEntry) -> Any:
        """Return the connection for a new record, or for one that was invalidated."""
        found = self._arriving.pop(id(connection_record), None)
        home, item = self._take() if found is None else found
        record: Any = connection_record
        record.moored_origin = home, item
        record.moored_pool._records[id(item.conn)] = record
        return self._adapted(item.conn)

    def give_back(self, record: ConnectionPoolEntry) -> None:
        """Return a connection whose transaction SQLAlchemy has ended."""
        home, item = record.moored_origin  # type: ignore[attr-defined]
        if home._is_clean(item.conn) or self._is_rolled_back(home, record, item.conn):
            self._give(home, item)
        elif home._owns(item):
            home.reservoir.upkeep.later(partial(home.reservoir.discard, item.conn))

    def _is_rolled_back(self, home: P, record: ConnectionPoolEntry, conn: Any) -> bool:
        """Roll back a transaction that SQLAlchemy has not ended (`pool_reset_on_return=None`)."""
        if home.reservoir.recipe.driver.state(conn) is not DriverState.TRANSACTION:
            return False
        try:
            self._roll_back(record.dbapi_connection)
        except Exception as error:
            log.warning("%s: rollback failed: %s", home.name, describe(error))
        return home._is_clean(conn)

    def discard(self, keeper: ReservoirPool, dbapi_connection: Any) -> None:
        """Close a connection that is broken, or was detached or invalidated."""
        conn = self._dialect.get_driver_connection(dbapi_connection)
        for pool in self._pools:
            item = pool.reservoir.core.items.get(id(conn))
            if pool.reservoir.pid == os.getpid() and item is not None:
                keeper.take_record(item)  # SQLAlchemy has called the listeners
                pool.reservoir.upkeep.later(partial(pool.reservoir.discard, conn))

    def _on_close(self, item: Item[Any]) -> Callable[[], Any] | None:
        """Return what the reservoir calls before it closes a connection that SQLAlchemy knows."""
        keeper = self.keeper()
        record = None if keeper is None else keeper.take_record(item)
        if keeper is None or record is None or not keeper.dispatch.close:
            return None
        report = partial(keeper.report_close, record)
        # A listener of an async engine may call methods of the connection that await.
        return partial(concurrency.greenlet_spawn, report) if self._dialect.is_async else report

    def ping_ready(self) -> None:
        """Ping every ready connection, because one was lost."""
        if self.pool.reservoir.usable:
            self.pool.reservoir.upkeep.ping_idle(0.0, PING_TIMEOUT)

    def _prepare(self, on_connect: Callable[[Any], object] | None) -> Callable[[Any], None]:
        def prepare(dbapi_connection: Any) -> None:
            if on_connect is not None:
                on_connect(dbapi_connection)
            conn = self._dialect.get_driver_connection(dbapi_connection)
            _register_hstore(conn, self._parameters.get("context"))

        return prepare

    @contextmanager
    def _errors_of(self, pool: P) -> Iterator[None]:
        """Translate a pool's errors into SQLAlchemy's."""
        try:
            yield
        except ServerUnreachable as error:
            dbapi: Any = self._dialect.loaded_dbapi
            raise dbapi.OperationalError(str(error)) from error.__cause__
        except PoolTimeout as error:
            raise EngineTimeout(str(error)) from None
        except PoolClosed:
            if pool is self.pool:
                raise  # else the engine was disposed of meanwhile: try the new pool

    def dispose(self) -> None:
        """Close the pool; the next use opens a new one."""
        self._close(self._renew())

    def _renew(self) -> P:
        """Replace the current pool by a new one, opened at first use; return the former one.

        Connections in use are returned to the pool that they came from.
        """
        former, *older = self._pools
        left = [pool for pool in older if pool.reservoir.core.items]
        self._pools = [self._new_pool(), former, *left]
        return former

    def _new_pool(self) -> P:
        pool = self._make()
        pool.reservoir.on_close = self._on_close
        return pool

    def _on_engine_collected(self) -> None:
        """Close the pool of an engine that was garbage-collected without `dispose()`."""
        if self.pool.reservoir.usable:
            self._close_soon(self.pool)

    def _close_soon(self, pool: P) -> None:
        """Close a pool on its own loop, without waiting; from any thread."""
        stop = pool.close if isinstance(pool, AsyncConnectionPool) else pool.reservoir.stop
        pool.reservoir.upkeep.later(lambda: _closing.start(stop(), name=f"{pool.name}-close"))

    # -- what differs between threads and asyncio -----------------------------------------------

    @abstractmethod
    def _make(self) -> P:
        """Create a pool, without opening it."""

    @abstractmethod
    def _take(self) -> tuple[P, Item[Any]]:
        """Check out a connection of the current pool, after waiting for it if need be."""

    def _adapted(self, conn: Any) -> Any:
        """Wrap a driver's connection as SQLAlchemy needs it."""
        return conn

    @abstractmethod
    def _roll_back(self, dbapi_connection: Any) -> None:
        """Roll back within `PING_TIMEOUT`, or close the connection and raise."""

    @abstractmethod
    def _give(self, pool: P, item: Item[Any]) -> None:
        """Return a clean connection to its pool."""

    @abstractmethod
    def _close(self, pool: P) -> None:
        """Close a pool."""


class _Threads(_Source[ConnectionPool[Any]]):
    drivers = frozenset({"postgresql+psycopg"})

    def _make(self) -> ConnectionPool[Any]:
        return ConnectionPool(self._place(), open=False, **self._settings)

    def _take(self) -> tuple[ConnectionPool[Any], Item[Any]]:
        while True:
            pool = self._pools[0]
            take, monotonic = pool._take, pool._monotonic
            with pool._lock:
                item = take(monotonic())
            if item is not None:
                item.holder = get_ident()
                return pool, item
            with self._errors_of(pool):
                if pool.reservoir.state == "new":
                    pool.open()
                return pool, pool._checkout(pool.timeout)

    def _roll_back(self, dbapi_connection: Any) -> None:
        self.pool.reservoir.recipe.driver.rollback(dbapi_connection, PING_TIMEOUT)

    def _give(self, pool: ConnectionPool[Any], item: Item[Any]) -> None:
        lock = pool._lock
        if not (lock.acquire(False) or lock.acquire(timeout=PATIENCE)):
            # This thread holds the lock: the garbage collector runs inside the reservoir's code.
            pool.reservoir.upkeep.later(partial(self._give, pool, item))
            return
        try:
            waiter = pool._give(item, pool._monotonic())
        finally:
            lock.release()
        if waiter is not None or pool._retired:
            pool.reservoir.carry_out(waiter)

    def _close(self, pool: ConnectionPool[Any]) -> None:
        pool.close()


class _Asyncio(_Source[AsyncConnectionPool[Any]]):
    drivers = frozenset({"postgresql+asyncpg", "postgresql+psycopg", "postgresql+psycopg_async"})

    def _make(self) -> AsyncConnectionPool[Any]:
        settings = dict(self._settings)
        if self._url.drivername == "postgresql+asyncpg":
            with extra("asyncpg", "postgresql+asyncpg://"):
                import asyncpg
            settings["connect"] = asyncpg.connect
        # Like SQLAlchemy's own pool: end the transaction, and leave the session unchanged.
        return AsyncConnectionPool(self._place(), reset=False, **settings)

    def _take(self) -> tuple[AsyncConnectionPool[Any], Item[Any]]:
        pool = self._pools[0]
        loop = asyncio._get_running_loop()
        item = pool._take(pool._monotonic()) if pool._loop is loop else None
        if item is None:
            self._follow_loop()
            return _await(self._wait())  # type: ignore[no-any-return]
        item.holder = asyncio.current_task(loop)
        return pool, item

    async def _wait(self) -> tuple[AsyncConnectionPool[Any], Item[Any]]:
        while True:
            pool = self.pool
            with self._errors_of(pool):
                return pool, await pool._checkout(pool.timeout)

    def _adapted(self, conn: Any) -> Any:
        adapter = {name: self._parameters[name] for name in ADAPTER if name in self._parameters}
        dbapi: Any = self._dialect.loaded_dbapi
        return dbapi.connect(async_creator_fn=partial(_existing, conn), **adapter)

    def _roll_back(self, dbapi_connection: Any) -> None:
        conn = self._dialect.get_driver_connection(dbapi_connection)
        driver = self.pool.reservoir.recipe.driver
        if driver.name == "psycopg":
            _await(driver.rollback(conn, PING_TIMEOUT))
            return
        # SQLAlchemy's adapter of asyncpg has its own transaction object, which must be ended, too.
        timer = asyncio.get_running_loop().call_later(PING_TIMEOUT, conn.terminate)
        try:
            self._do_rollback(dbapi_connection)
        finally:
            timer.cancel()

    def _give(self, pool: AsyncConnectionPool[Any], item: Item[Any]) -> None:
        if pool._loop is asyncio._get_running_loop():
            waiter = pool._give(item, pool._monotonic())
            if waiter is not None or pool._retired:
                pool.reservoir.carry_out(waiter)
        else:
            pool.reservoir.upkeep.later(partial(self._give, pool, item))

    def _follow_loop(self) -> None:
        """Replace the pool if its event loop has ended, or belongs to a parent process."""
        reservoir, home = self.pool.reservoir, self.pool._loop
        if home is None or home is asyncio.get_running_loop():
            return
        if reservoir.pid == os.getpid() and not home.is_closed():
            raise RuntimeError(
                f"{self.pool!r} runs on another event loop: create one engine for each loop, or "
                "dispose of the engine there before it is used here"
            )
        self._close(self._renew())

    def _close(self, pool: AsyncConnectionPool[Any]) -> None:
        if not pool.reservoir.usable:
            pool.reservoir.state = "closed"
        elif pool._loop is None or pool._loop.is_closed():
            pool._abandon()
            if (keeper := self.keeper()) is not None:
                keeper.report_abandoned(pool)
        elif pool._loop is not asyncio._get_running_loop():
            self._close_soon(pool)
        else:
            try:
                _await(pool.close())
            except exc.MissingGreenlet:
                self._close_soon(pool)  # `dispose()` of a `sync_engine` cannot await


# -- helpers ---------------------------------------------------------------------------------------


def _register_hstore(conn: Any, context: Any) -> None:
    """Register hstore with a connection that was opened before SQLAlchemy found the type."""
    hstore = None if context is None else context.adapters.types.get("hstore")
    if hstore is not None and conn.adapters.types.get("hstore") is None:
        register_hstore(hstore, conn)


async def _existing(conn: Any) -> Any:
    return conn
