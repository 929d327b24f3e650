"""How a connection is made: from what, with which options, by whom."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from moored.kernel import SECRETS, awaited, in_thread, run_callback

from ._asyncpg import AsyncpgDriver
from ._budget import Destination
from ._conninfo import resolve
from ._driver import Connect, Driver, Hooks, driver_of
from ._psycopg import PsycopgDriver
from ._tokens import Tokens

__all__ = ["Recipe"]

Conninfo = str | Callable[[], str | Awaitable[str]]
Options = Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]


class Recipe:
    """Makes connections: resolves what is callable, adds the token, and calls the driver.

    A driver for threads is called in a thread of its own, so that the loop never waits for it.
    """

    def __init__(
        self,
        conninfo: Conninfo,
        options: Options | None,
        *,
        connect: Connect | None,
        connection_class: type | None,
        hooks: Hooks,
        tokens: Tokens | None,
        endpoint: str | None,
        asynchronous: bool,
        connect_timeout: float,
        name: str,
    ) -> None:
        self._conninfo = conninfo
        self._options = options
        self._connect = connect
        self._hooks = hooks
        self.tokens = tokens
        self._endpoint = endpoint
        self.asynchronous = asynchronous
        self._connect_timeout = connect_timeout
        self._name = name
        self._first: tuple[str, dict[str, Any]] | None = None
        #: Called when the driver is known.
        self.on_driver: Callable[[], None] = lambda: None
        driver = driver_of(connect, connection_class, asynchronous=asynchronous)
        self.known = driver is not None
        self.driver: Driver = Driver(connect or (lambda: None))
        if driver is not None:
            self._use(driver)

    @property
    def place(self) -> str:
        """What it connects to, without who does."""
        if self._endpoint is not None or not isinstance(self._conninfo, str):
            return self._endpoint or ""
        options = self._options if isinstance(self._options, Mapping) else {}
        return _place_of(self._conninfo, options)

    def _use(self, driver: Driver) -> None:
        wanted = "asyncio" if self.asynchronous else "threads"
        if driver.kind not in (wanted, "any"):
            raise TypeError(
                f"{driver.name} is a driver for {driver.kind}, and this pool is for {wanted}: use "
                f"{'ConnectionPool' if self.asynchronous else 'AsyncConnectionPool'} with it"
            )
        self.driver = self._hooks.over(driver)
        self.known = True
        self.on_driver()

    async def endpoint(self) -> Destination:
        """Who connects to what, as far as it can be told."""
        if self._endpoint is not None:
            return Destination(self._endpoint)
        text, options = self._first = await self._parameters()
        libpq = isinstance(self.driver, PsycopgDriver | AsyncpgDriver)
        return _endpoint_of(text, options, libpq=libpq) or Destination(self._name)

    async def connect_in_time(
        self, token: str | None, close: Callable[[Any], Awaitable[None]]
    ) -> Any:
        """A new connection within the time for a connect; if it is cancelled, none is left over."""
        if self.asynchronous:
            async with asyncio.timeout(self._connect_timeout):
                return await self.connect(token)
        # A thread cannot be stopped: what it opens although nobody waits for it any more must be
        # closed, and until then it counts, with its lease.
        connecting = asyncio.ensure_future(self.connect(token))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            await close(await connecting)
            raise

    async def connect(self, token: str | None) -> Any:
        """A new connection; the token, if there is one, is its password."""
        # A function is called once for each connection: the first one's has told the endpoint.
        conninfo, options = self._first or await self._parameters()
        self._first = None
        if token is not None:
            options["password"] = token
        SECRETS.add_from(conninfo)
        SECRETS.add(str(options.get("password") or ""))
        if isinstance(self.driver, PsycopgDriver):
            options.setdefault("connect_timeout", max(2, round(self._connect_timeout)))
        conn = await self._call(conninfo, options)
        if not self.known:
            try:
                found = driver_of(self._connect, asynchronous=self.asynchronous, sample=conn)
                assert found is not None
                self._use(found)
            except BaseException:
                await awaited(self.driver.close(conn))
                raise
        return conn

    async def _parameters(self) -> tuple[str, dict[str, Any]]:
        text = str(await self._resolve(self._conninfo) or "")
        return text, dict(await self._resolve(self._options) or {})

    async def _call(self, conninfo: str, options: dict[str, Any]) -> Any:
        if self.asynchronous:
            return await awaited(self.driver.connect(conninfo, options))
        return await in_thread(
            lambda: self.driver.connect(conninfo, options),
            name=f"{self._name}-connect",
            unwanted=self.driver.close,
        )

    async def _resolve(self, value: Any) -> Any:
        if not callable(value):
            return value
        if self.asynchronous:
            return await awaited(value())
        return await run_callback(value, name=f"{self._name}-conninfo")


def _endpoint_of(
    conninfo: str, options: Mapping[str, Any], *, libpq: bool = False
) -> Destination | None:
    """The server and the user in a conninfo; with libpq's defaults, if the driver follows them."""
    import psycopg

    try:
        found = resolve(conninfo, options)
    except psycopg.Error:
        return _endpoint_in(conninfo)  # another driver's own way to say it
    if not (libpq or conninfo or options.get("host") or options.get("port")):
        return None
    host = found.get("host") or found.get("hostaddr") or "localhost"
    return Destination(f"{host}:{found.get('port') or 5432}", str(found.get("user") or ""))


def _endpoint_in(text: str) -> Destination:
    """The endpoint in a URL that libpq does not take; it names leases, so no password is in it."""
    try:
        url = urlsplit(text)
        if url.hostname:
            port = f":{url.port or 5432}" if url.scheme.startswith("postgres") else ""
            port = port or (f":{url.port}" if url.port else "")
            return Destination(f"{url.hostname}{port}", url.username or "")
    except ValueError:
        pass  # not a URL
    if re.search(r"[=@]", text):
        return Destination(f"endpoint-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
    return Destination(text)


def _place_of(conninfo: str, options: Mapping[str, Any]) -> str:
    """A host and a database, as in "db/orders"; never a user, let alone a password."""
    import psycopg

    try:
        found = resolve(conninfo, options)
    except psycopg.Error:
        return ""
    if not conninfo and not found.get("host"):
        return ""  # it is only known inside a function of the user's
    place = str(found.get("host") or "localhost")
    if str(found.get("port") or 5432) != "5432":
        place += f":{found['port']}"
    database = found.get("dbname") or found.get("database")
    return f"{place}/{database}" if database else place
