"""How a connection is opened: conninfo, options, token and driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any
from urllib.parse import urlsplit

import psycopg

from moored.kernel import SECRETS, awaited, in_thread, outliving, run_callback

from ._asyncpg import AsyncpgDriver
from ._budget import Destination
from ._conninfo import resolve, server_of
from ._driver import Connect, Driver, Hooks
from ._find_driver import driver_of
from ._psycopg import PsycopgDriver
from ._tokens import Tokens

__all__ = ["Recipe"]

Conninfo = str | Callable[[], str | Awaitable[str]]
Options = Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]


@dataclass(eq=False, repr=False, kw_only=True)
class Recipe:
    """Opens connections: calls the conninfo functions, adds the token, and calls the driver.

    A driver for threads is called in a thread, so that it never blocks the loop.
    """

    conninfo: Conninfo
    kwargs: Options | None
    connector: Connect | None
    connection_class: InitVar[type | None]
    hooks: Hooks
    tokens: Tokens | None
    #: The server's name in leases and rate limits, if the user gives one.
    address: str | None
    asynchronous: bool
    connect_timeout: float
    name: str
    #: Called when the driver is known.
    on_driver: Callable[[], None] = lambda: None
    known: bool = False
    _first: tuple[str, dict[str, Any]] | None = None

    def __post_init__(self, connection_class: type | None) -> None:
        self.driver = Driver(self.connector or (lambda: None))
        found = driver_of(self.connector, connection_class, asynchronous=self.asynchronous)
        if found is not None:
            self._use(found)

    @property
    def place(self) -> str:
        """The server and database, without user and password; empty if unknown."""
        if self.address is not None or not isinstance(self.conninfo, str):
            return self.address or ""
        options = self.kwargs if isinstance(self.kwargs, Mapping) else {}
        return _place_of(self.conninfo, options)

    @property
    def server(self) -> str:
        """The server as "host:port", if it is known, and the name of the pool otherwise."""
        if self.address is not None or not (self.libpq and self.place):
            return (self.address or self.name).rpartition("/")[0] or self.address or self.name
        options = self.kwargs if isinstance(self.kwargs, Mapping) else {}
        return server_of(resolve(str(self.conninfo), options))

    @property
    def libpq(self) -> bool:
        """Whether the driver takes the parameters of libpq: the server is a PostgreSQL."""
        return isinstance(self.driver, PsycopgDriver | AsyncpgDriver)

    def _use(self, driver: Driver) -> None:
        wanted = "asyncio" if self.asynchronous else "threads"
        if driver.kind not in (wanted, "any"):
            raise TypeError(
                f"{driver.name} is a driver for {driver.kind}, but this pool is for {wanted}: use "
                f"{'ConnectionPool' if self.asynchronous else 'AsyncConnectionPool'}"
            )
        self.driver = self.hooks.apply_to(driver)
        self.known = True
        self.on_driver()

    async def endpoint(self) -> Destination:
        """Return the server and the user; the pool's name stands in for an unknown server."""
        if self.address is not None:
            return Destination(self.address)
        text, options = self._first = await self._parameters()
        return _endpoint_of(text, options, libpq=self.libpq) or Destination(self.name)

    async def connect_in_time(
        self, token: str | None, close: Callable[[Any], Awaitable[None]]
    ) -> Any:
        """Open a connection within `connect_timeout`; leave none behind if cancelled."""
        if self.asynchronous:
            async with asyncio.timeout(self.connect_timeout):
                return await self.connect(token)
        # A thread cannot be cancelled: the connection that it opens must be closed, and it counts,
        # with its lease, until then.
        connecting = asyncio.ensure_future(self.connect(token))
        try:
            return await outliving(connecting)
        except asyncio.CancelledError:
            await close(await connecting)
            raise

    async def connect(self, token: str | None) -> Any:
        """Open a connection; the token, if there is one, is its password."""
        # A conninfo function is called once per connection; `endpoint` has called it for the first.
        conninfo, options = self._first or await self._parameters()
        self._first = None
        if token is not None:
            options["password"] = token
        SECRETS.add_from(conninfo)
        SECRETS.add(str(options.get("password") or ""))
        if isinstance(self.driver, PsycopgDriver):
            options.setdefault("connect_timeout", max(2, round(self.connect_timeout)))
        conn = await self._call(conninfo, options)
        if not self.known:
            try:
                found = driver_of(self.connector, asynchronous=self.asynchronous, sample=conn)
                assert found is not None
                self._use(found)
            except BaseException:
                await awaited(self.driver.close(conn))
                raise
        return conn

    async def _parameters(self) -> tuple[str, dict[str, Any]]:
        text = str(await self._resolve(self.conninfo) or "")
        return text, dict(await self._resolve(self.kwargs) or {})

    async def _call(self, conninfo: str, options: dict[str, Any]) -> Any:
        if self.asynchronous:
            return await awaited(self.driver.connect(conninfo, options))
        return await in_thread(
            lambda: self.driver.connect(conninfo, options),
            name=f"{self.name}-connect",
            unwanted=self.driver.close,
        )

    async def _resolve(self, value: Any) -> Any:
        if not callable(value):
            return value
        if self.asynchronous:
            return await awaited(value())
        return await run_callback(value, name=f"{self.name}-conninfo")


def _endpoint_of(
    conninfo: str, options: Mapping[str, Any], *, libpq: bool = False
) -> Destination | None:
    """The server and user of a conninfo; with libpq's defaults if the driver uses them."""
    try:
        found = resolve(conninfo, options)
    except psycopg.Error:
        return _endpoint_in(conninfo)  # another driver's own format
    if not (libpq or conninfo or options.get("host") or options.get("port")):
        return None
    host = found.get("host") or found.get("hostaddr") or "localhost"
    return Destination(f"{host}:{found.get('port') or 5432}", str(found.get("user") or ""))


def _endpoint_in(text: str) -> Destination | None:
    """The endpoint of a URL that libpq does not parse; it names leases, so without a password."""
    try:
        url = urlsplit(text)
        port = url.port or (5432 if url.scheme.startswith("postgres") else None)
    except ValueError:
        return None
    if not url.hostname:
        return None
    return Destination(f"{url.hostname}:{port}" if port else url.hostname, url.username or "")


def _place_of(conninfo: str, options: Mapping[str, Any]) -> str:
    """The host and the database, as in "db/orders"; never a user or a password."""
    try:
        found = resolve(conninfo, options)
    except psycopg.Error:
        return ""
    if not conninfo and not found.get("host"):
        return ""  # only known to the user's connect function
    place = str(found.get("host") or "localhost")
    if str(found.get("port") or 5432) != "5432":
        place += f":{found['port']}"
    database = found.get("dbname") or found.get("database")
    return f"{place}/{database}" if database else place
