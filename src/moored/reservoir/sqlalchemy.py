"""SQLAlchemy engines whose connections are ready before they are needed.

SQLAlchemy opens a connection when a caller needs one, and replaces it when it is too old. Engines
that are made here are SQLAlchemy's own, with its own pool, events and settings; but that pool gets
its connections from a reservoir, which opens them ahead, at a limited rate, and replaces them one
by one before they end::

    engine = create_engine("postgresql://app@db/orders", pool_size=20, max_overflow=0)
    with Session(engine) as session:
        session.add(Order(1))
        session.commit()

What always holds:

- a connection that sits in SQLAlchemy's pool still belongs to the reservoir, which closes it when
  its time is over, its lease is lost, or the server has ended it;
- no caller gets such a connection: at checkout SQLAlchemy takes another one instead, in the same
  call;
- what SQLAlchemy closes is kept by the reservoir if it works and no transaction is open;
- a connection that SQLAlchemy has found to be broken is not kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import sqlalchemy
from psycopg.types.hstore import register_hstore
from sqlalchemy import event, exc
from sqlalchemy.dialects import plugins
from sqlalchemy.engine import URL, CreateEnginePlugin, Engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.ext.asyncio import create_async_engine as sqlalchemy_create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, QueuePool
from sqlalchemy.util import concurrency

from moored.kernel import describe, refuse
from moored.leases import Leases
from moored.leases import sync as leases_sync

from ._beneath import abandon, close_soon, holds, later, open_once, unread
from ._config import ReservoirConfig
from ._errors import PoolClosed, PoolTimeout
from ._item import Item
from ._pool import CHECK_IDLE, PING_TIMEOUT, Pool
from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._tokens import Provider, Tokens

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect, ExceptionContext

__all__ = ["EngineTimeout", "create_async_engine", "create_engine", "reservoir_of"]

log = logging.getLogger("moored.reservoir")

P = TypeVar("P", bound=Pool[Any])

#: SQLAlchemy's own defaults.
POOL_SIZE, MAX_OVERFLOW, POOL_TIMEOUT = 5, 10, 30.0
#: What is for the reservoir, of all that an engine is made with.
SETTINGS = (
    *("config", "tokens", "leases", "creation_rate", "creation_burst", "max_lifetime", "max_idle"),
    *("check_idle", "leak_after", "endpoint", "service", "name", "clock", "recorder"),
)
#: What SQLAlchemy's adapter of asyncpg keeps for itself.
ADAPTER = ("prepared_statement_cache_size", "prepared_statement_name_func")
PLUGIN = "moored.reservoir"

# SQLAlchemy 2.1 has given it this name.
_await: Callable[[Any], Any] = getattr(concurrency, "await_", None) or concurrency.await_only


class EngineTimeout(PoolTimeout, exc.TimeoutError, exc.DontWrapMixin):
    """No connection within `pool_timeout`: both `PoolTimeout` and SQLAlchemy's own timeout."""


def create_engine(
    url: str | URL,
    *,
    config: ReservoirConfig | None = None,
    tokens: Tokens | Provider | None = None,
    leases: Leases | leases_sync.Leases | str | None = None,
    creation_rate: float | None = None,
    **options: Any,
) -> Engine:
    """SQLAlchemy's `create_engine`, with a reservoir under its pool.

    It takes what SQLAlchemy's takes, and begins to connect at first use. How many connections there
    may be is `pool_size` + `max_overflow`, or `config.max_size` if neither is given; a caller waits
    for one for up to `pool_timeout`. `engine.dispose()` closes all of them, and the next use opens
    a new reservoir.

    :param url: `postgresql://…` or `postgresql+psycopg://…`.
    :param config: every setting of the reservoir at once, for example from `from_env`.
    :param tokens: makes passwords that end after a while, for example `aws.DsqlTokens(…)`.
    :param leases: the URL of a lease store, or a client: limits the connections of the cluster.
    :param creation_rate: how many connections may be opened per second (100).
    :param options: SQLAlchemy's own, and those of `ConnectionPool` that are for the reservoir:
        `creation_burst`, `max_lifetime`, `max_idle`, `check_idle`, `leak_after`, `endpoint`,
        `service`, `name`, `clock`, `recorder`.
    """
    given = {"config": config, "tokens": tokens, "leases": leases, "creation_rate": creation_rate}
    url, options = _planned(url, {**options, **given}, "create_engine", _Threads)
    return sqlalchemy.create_engine(url, **options)


def create_async_engine(
    url: str | URL,
    *,
    config: ReservoirConfig | None = None,
    tokens: Tokens | Provider | None = None,
    leases: Leases | leases_sync.Leases | str | None = None,
    creation_rate: float | None = None,
    **options: Any,
) -> AsyncEngine:
    """SQLAlchemy's `create_async_engine`, with a reservoir under its pool.

    It is `create_engine` for asyncio, with `postgresql+asyncpg://…` besides. The reservoir runs on
    the event loop that uses the engine first; end it there with `await engine.dispose()`.
    """
    given = {"config": config, "tokens": tokens, "leases": leases, "creation_rate": creation_rate}
    url, options = _planned(url, {**options, **given}, "create_async_engine", _Asyncio)
    return sqlalchemy_create_async_engine(url, **options)


@overload
def reservoir_of(engine: Engine) -> ConnectionPool[Any]: ...
@overload
def reservoir_of(engine: AsyncEngine) -> AsyncConnectionPool[Any]: ...
def reservoir_of(engine: Engine | AsyncEngine) -> ConnectionPool[Any] | AsyncConnectionPool[Any]:
    """The pool under SQLAlchemy's own: for its statistics, to `drain()` it, or to fill it ahead of
    the first use with `open(wait=True)`.

    After `dispose()` the engine has another one.
    """
    dialect = (engine.sync_engine if isinstance(engine, AsyncEngine) else engine).dialect
    source: _Source[Any] | None = getattr(dialect, "moored_source", None)
    if source is None:
        raise ValueError(
            f"{engine!r} has no reservoir: make it with moored.reservoir.sqlalchemy."
            f"{'create_async_engine' if isinstance(engine, AsyncEngine) else 'create_engine'}"
        )
    pool: ConnectionPool[Any] | AsyncConnectionPool[Any] = source.pool
    return pool


# -- how an engine is made -------------------------------------------------------------------------


def _planned(
    url: str | URL, options: dict[str, Any], subject: str, kind: type[_Source[Any]]
) -> tuple[URL, dict[str, Any]]:
    """What SQLAlchemy's own function is to be called with."""
    url = make_url(url)
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    refuse(subject, [*_wrong_driver(url, kind), *_wrong_options(options)])
    _agree_on_size(settings, options)
    settings["timeout"] = options.get("pool_timeout", POOL_TIMEOUT)
    if options.get("pool_pre_ping"):
        settings["check_idle"] = None  # SQLAlchemy asks them all
    source = kind(url, options.pop("connect_args", {}), settings)
    ours = {"pool_recycle": -1, "creator": source.take, "moored_source": source}
    return url, {**options, **ours, "plugins": [*options.get("plugins", ()), PLUGIN]}


def _wrong_driver(url: URL, kind: type[_Source[Any]]) -> Iterator[str]:
    if url.drivername not in kind.drivers:
        known = " or ".join(f"{name}://…" for name in sorted(kind.drivers))
        hint = "; asyncpg needs create_async_engine" if "asyncpg" in url.drivername else ""
        yield f"{url.drivername}://… is no driver that a reservoir can open: use {known}{hint}"


def _wrong_options(options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("pool_recycle", -1) != -1:
        yield (
            f"pool_recycle={options['pool_recycle']!r}: the reservoir manages how long connections "
            "live, also those in SQLAlchemy's pool; set max_lifetime, or base_lifetime in config"
        )
    for name in ("creator", "async_creator", "pool"):
        if options.get(name) is not None:
            yield f"{name}: the connections come from the reservoir, so there can be no other"
    poolclass = options.get("poolclass") or QueuePool
    if not issubclass(poolclass, QueuePool | NullPool):
        yield f"poolclass={poolclass.__name__}: it must be a QueuePool or a NullPool"
    if options.get("pool_size") == 0 or options.get("max_overflow", 0) < 0:
        yield (
            "pool_size=0 or max_overflow=-1 sets no limit, and a reservoir needs one: give numbers"
        )


def _agree_on_size(settings: dict[str, Any], options: dict[str, Any]) -> None:
    """SQLAlchemy's pool and the reservoir have the same size: then a caller who found no connection
    in the one can always get one from the other."""
    config: ReservoirConfig | None = settings.get("config")
    said = "pool_size" in options or "max_overflow" in options
    if config is not None and not said:
        if not issubclass(options.get("poolclass") or QueuePool, NullPool):
            options.update(pool_size=config.max_size, max_overflow=0)
        return
    size = options.get("pool_size", POOL_SIZE) + options.get("max_overflow", MAX_OVERFLOW)
    settings["max_size"] = size


class _Plugin(CreateEnginePlugin):
    """Gets hold of a new engine's dialect before SQLAlchemy asks it how to prepare connections."""

    def __init__(self, url: URL, kwargs: dict[str, Any]) -> None:
        self._source: _Source[Any] = kwargs.pop("moored_source")

    def update_url(self, url: URL) -> URL:
        return url

    def handle_pool_kwargs(self, pool_cls: Any, pool_args: dict[str, Any]) -> None:
        self._source.adopt(pool_args["dialect"])

    def engine_created(self, engine: Engine) -> None:
        self._source.serve(engine)


plugins.register(PLUGIN, __name__, "_Plugin")


# -- where its connections come from ---------------------------------------------------------------


class _Source(ABC, Generic[P]):
    """Where an engine's connections come from, and go to: a pool under SQLAlchemy's own.

    It must not hold on to the engine, which would then never be collected.
    """

    drivers: frozenset[str]

    def __init__(
        self, url: URL, connect_args: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._url = url
        self._connect_args = connect_args
        self._check_idle = settings.get("check_idle", CHECK_IDLE)
        self._parameters: dict[str, Any] = {}
        self._settings = {**settings, "kwargs": self._options}
        # The one in use, and those that were closed while connections of theirs were in use.
        self._pools: list[P] = [self._make()]
        self._settings["name"] = self.pool.name
        # What SQLAlchemy has prepared, by the driver's connection in it.
        self._prepared: dict[int, Any] = {}
        # When SQLAlchemy last lost a connection: what rested then is asked for a sign of life.
        self._doubt = -math.inf

    @property
    def pool(self) -> P:
        """Where connections come from now."""
        return self._pools[0]

    def adopt(self, dialect: Dialect) -> None:
        """Let SQLAlchemy give back where it would close, and wake before it asks."""
        on_connect, ping = dialect.on_connect, dialect.do_ping

        def wake_and_ping(dbapi_connection: Any) -> bool:
            self._wake(dbapi_connection)
            return ping(dbapi_connection)

        self._dialect = dialect
        dialect.on_connect = lambda: self._once(on_connect())  # type: ignore[method-assign]
        dialect.do_ping = wake_and_ping  # type: ignore[method-assign]
        dialect.do_close = partial(self._take_back, bad=False)  # type: ignore[method-assign]
        dialect.do_terminate = partial(self._take_back, bad=True)  # type: ignore[method-assign]
        # What is given back need not be awaited, so it can be done by a garbage collector too.
        dialect.has_terminate = True
        dialect.moored_source = self  # type: ignore[attr-defined]

    def serve(self, engine: Engine) -> None:
        """Listen to what the engine and its pool do."""
        _, found = self._dialect.create_connect_args(engine.url)
        self._parameters = {**found, **self._connect_args}
        event.listen(engine, "checkout", self._on_checkout, insert=True)
        event.listen(engine, "checkin", self._on_checkin)
        event.listen(engine, "handle_error", self._on_error, insert=True)
        event.listen(engine, "engine_disposed", self._on_disposed)
        weakref.finalize(engine, self._forsaken).atexit = False

    # -- what the reservoir asks ---------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """What a new connection is opened with."""
        options = dict(self._parameters)
        for change in self._dialect.dispatch.do_connect:
            if change(self._dialect, None, [], options) is not None:
                raise TypeError(
                    "a do_connect listener returned a connection of its own: it may only change "
                    "the parameters, because the reservoir connects"
                )
        return {name: value for name, value in options.items() if name not in ADAPTER}

    def _place(self) -> str:
        """The server alone, for people; everything that counts is in the options."""
        url = self._url
        if not url.host:
            return ""
        place = URL.create("postgresql", host=url.host, port=url.port, database=url.database)
        return place.render_as_string()

    # -- what SQLAlchemy does --------------------------------------------------------------------

    def _once(self, on_connect: Callable[[Any], object] | None) -> Callable[[Any], None]:
        """Prepare each connection once, although SQLAlchemy may get it again and again."""

        def prepare(dbapi_connection: Any) -> None:
            conn = self._dialect.get_driver_connection(dbapi_connection)
            if self._prepared.get(id(conn)) is dbapi_connection:
                return
            if on_connect is not None:
                on_connect(dbapi_connection)
            _teach(conn, self._parameters.get("context"))
            for key, other in list(self._prepared.items()):
                if self._home(self._dialect.get_driver_connection(other)) is None:
                    self._prepared.pop(key, None)
            self._prepared[id(conn)] = dbapi_connection

        return prepare

    def _on_checkout(self, dbapi_connection: Any, record: object, proxy: object) -> None:
        self._wake(dbapi_connection)

    def _wake(self, dbapi_connection: Any) -> None:
        """Make sure that a connection can be used, or let SQLAlchemy take another."""
        conn = self._dialect.get_driver_connection(dbapi_connection)
        home = self._home(conn)
        if home is None or not self._is_fit(*home):
            raise exc.DisconnectionError("the reservoir has replaced this connection")

    def _is_fit(self, pool: P, item: Item[Any]) -> bool:
        reservoir = pool.reservoir
        rested_since = item.since
        if not reservoir.rest(item.conn, resting=False):
            return False
        reservoir.mark(item, reservoir._current())
        rested = item.since - rested_since
        must_ask = self._check_idle is not None and rested >= self._check_idle
        if not (must_ask or rested_since <= self._doubt or unread(item.conn)):
            return True
        try:
            self._ping(pool, item.conn)
        except BaseException as error:
            log.info("%s: a connection failed its check: %s", pool.name, describe(error))
            reservoir.works.lost += 1
            reservoir.discard(item.conn, "failed_check")
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _on_checkin(self, dbapi_connection: Any, record: ConnectionPoolEntry) -> None:
        if dbapi_connection is None:
            return
        home = self._home(self._dialect.get_driver_connection(dbapi_connection))
        if home is None or not self._may_rest(*home):
            record.close()

    def _may_rest(self, pool: P, item: Item[Any]) -> bool:
        return pool.reservoir.rest(item.conn, resting=True)

    def _take_back(self, dbapi_connection: Any, *, bad: bool) -> None:
        """SQLAlchemy would close a connection: it has no use for it, or it is bad."""
        conn = self._dialect.get_driver_connection(dbapi_connection)
        if (home := self._home(conn)) is not None:
            self._give_back(home[0], partial(home[0].reservoir.give_back, conn, bad=bad))

    def _on_error(self, context: ExceptionContext) -> None:
        """One lost connection says nothing of the others, and to replace them all at once is what a
        reservoir is there to avoid: they are asked, each at its next use."""
        if context.is_disconnect:
            context.invalidate_pool_on_disconnect = False
            self._doubt = self.pool.reservoir.clock.monotonic()

    def _on_disposed(self, engine: object) -> None:
        self._close(self._renew())

    def _renew(self) -> P:
        """From now on connections come from a new pool, opened at first use; returns the old one,
        to which those go back that are in use."""
        former, *older = self._pools
        left = [pool for pool in older if pool.reservoir.core.items]
        self._pools = [self._make(), former, *left]
        return former

    def _forsaken(self) -> None:
        """The engine is gone, and nobody has disposed of it."""
        if self.pool.reservoir.usable:
            close_soon(self.pool)

    def _home(self, conn: Any) -> tuple[P, Item[Any]] | None:
        """The pool that a connection belongs to; None if it is gone, or a parent process's."""
        for pool in self._pools:
            item = pool.reservoir.core.items.get(id(conn))
            if item is not None and item.conn is conn:
                return (pool, item) if pool.reservoir.pid == os.getpid() else None
        return None

    # -- what differs between threads and asyncio -----------------------------------------------

    @abstractmethod
    def _make(self) -> P:
        """A new pool, not open yet."""

    @abstractmethod
    def take(self) -> Any:
        """A connection for SQLAlchemy, after waiting for it if need be."""

    @abstractmethod
    def _ping(self, pool: P, conn: Any) -> None:
        """Ask for a sign of life."""

    @abstractmethod
    def _give_back(self, pool: P, give_back: Callable[[], None]) -> None:
        """Give a connection back, wherever this is called from."""

    @abstractmethod
    def _close(self, pool: P) -> None:
        """Close a pool."""


class _Threads(_Source[ConnectionPool[Any]]):
    drivers = frozenset({"postgresql+psycopg"})

    def _make(self) -> ConnectionPool[Any]:
        return ConnectionPool(self._place(), open=False, **self._settings)

    def take(self) -> Any:
        while True:
            pool = self.pool
            try:
                open_once(pool)
                return pool.getconn()
            except PoolTimeout as error:
                raise EngineTimeout(str(error)) from None
            except PoolClosed:
                if pool is self.pool:
                    raise  # else somebody has disposed of the engine meanwhile

    def _ping(self, pool: ConnectionPool[Any], conn: Any) -> None:
        pool.reservoir.recipe.driver.ping(conn, PING_TIMEOUT)

    def _may_rest(self, pool: ConnectionPool[Any], item: Item[Any]) -> bool:
        # If not now, it does not rest in the reservoir's eyes; it is looked at when it is used.
        return holds(pool.reservoir.lock) or super()._may_rest(pool, item)

    def _give_back(self, pool: ConnectionPool[Any], give_back: Callable[[], None]) -> None:
        if holds(pool.reservoir.lock):
            later(pool, give_back)
        else:
            give_back()

    def _close(self, pool: ConnectionPool[Any]) -> None:
        pool.close()


class _Asyncio(_Source[AsyncConnectionPool[Any]]):
    drivers = frozenset({"postgresql+asyncpg", "postgresql+psycopg", "postgresql+psycopg_async"})

    def _make(self) -> AsyncConnectionPool[Any]:
        settings = dict(self._settings)
        if self._url.drivername == "postgresql+asyncpg":
            import asyncpg

            settings["connect"] = asyncpg.connect
        return AsyncConnectionPool(self._place(), **settings)

    def take(self) -> Any:
        conn = _await(self._take())
        known = self._prepared.get(id(conn))
        if known is not None and self._dialect.get_driver_connection(known) is conn:
            return known
        adapter = {name: self._parameters[name] for name in ADAPTER if name in self._parameters}
        dbapi: Any = self._dialect.loaded_dbapi
        return dbapi.connect(async_creator_fn=partial(_at_hand, conn), **adapter)

    async def _take(self) -> Any:
        while True:
            self._follow()
            pool = self.pool
            try:
                return await pool.getconn()
            except PoolTimeout as error:
                raise EngineTimeout(str(error)) from None
            except PoolClosed:
                if pool is self.pool:
                    raise  # else somebody has disposed of the engine meanwhile

    def _wake(self, dbapi_connection: Any) -> None:
        self._follow()
        super()._wake(dbapi_connection)

    def _follow(self) -> None:
        """A loop that has ended, or was a parent process's, is left for the one that runs."""
        reservoir, home = self.pool.reservoir, self.pool._loop
        if home is None or home is asyncio.get_running_loop():
            return
        if reservoir.pid == os.getpid() and not home.is_closed():
            raise RuntimeError(
                f"{self.pool!r} runs on another event loop, and so do its connections: make one "
                "engine for each loop, or dispose of it there before it is used here"
            )
        self._close(self._renew())

    def _ping(self, pool: AsyncConnectionPool[Any], conn: Any) -> None:
        _await(pool.reservoir.recipe.driver.ping(conn, PING_TIMEOUT))

    def _give_back(self, pool: AsyncConnectionPool[Any], give_back: Callable[[], None]) -> None:
        # A garbage collector may be at work, in any thread, in the middle of anything.
        later(pool, give_back)

    def _close(self, pool: AsyncConnectionPool[Any]) -> None:
        if not pool.reservoir.usable:
            pool.reservoir.state = "closed"
        elif pool._loop is None or pool._loop.is_closed():
            abandon(pool)
        elif pool._loop is not asyncio._get_running_loop():
            close_soon(pool)
        else:
            try:
                _await(pool.close())
            except exc.MissingGreenlet:
                close_soon(pool)  # of `sync_engine`, so it cannot be awaited


# -- small things ----------------------------------------------------------------------------------


def _teach(conn: Any, context: Any) -> None:
    """Tell a psycopg connection of a type that SQLAlchemy found after the connection was opened."""
    hstore = None if context is None else context.adapters.types.get("hstore")
    if hstore is not None and conn.adapters.types.get("hstore") is None:
        register_hstore(hstore, conn)


async def _at_hand(conn: Any) -> Any:
    return conn
