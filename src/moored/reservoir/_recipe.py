"""How a connection is made: from what, with which options, by whom."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from moored.kernel import in_thread

from ._budget import Endpoint
from ._driver import Connect, Driver, Hooks, driver_of
from ._psycopg import PsycopgDriver
from ._tokens import Tokens

__all__ = ["Recipe", "settled"]

Conninfo = str | Callable[[], str | Awaitable[str]]
Options = Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]


async def settled(value: Any) -> Any:
    """The value, awaited if it must be."""
    return await value if inspect.isawaitable(value) else value


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

    async def endpoint(self) -> Endpoint:
        """Who connects to what, as far as it can be told."""
        if self._endpoint is not None:
            return Endpoint(self._endpoint)
        text = await self._resolve(self._conninfo)
        options = dict(await self._resolve(self._options) or {})
        return _endpoint_of(str(text or ""), options) or Endpoint(self._name)

    async def connect(self, token: str | None) -> Any:
        """A new connection; the token, if there is one, is its password."""
        conninfo = str(await self._resolve(self._conninfo) or "")
        options = dict(await self._resolve(self._options) or {})
        if token is not None:
            options["password"] = token
        if isinstance(self.driver, PsycopgDriver):
            options.setdefault("connect_timeout", max(2, round(self._connect_timeout)))
        conn = await self._call(conninfo, options)
        if not self.known:
            try:
                found = driver_of(self._connect, asynchronous=self.asynchronous, sample=conn)
                assert found is not None
                self._use(found)
            except BaseException:
                await settled(self.driver.close(conn))
                raise
        return conn

    async def _call(self, conninfo: str, options: dict[str, Any]) -> Any:
        if self.asynchronous:
            return await settled(self.driver.connect(conninfo, options))
        return await in_thread(
            lambda: self.driver.connect(conninfo, options),
            name=f"{self._name}-connect",
            unwanted=self.driver.close,
        )

    async def _resolve(self, value: Any) -> Any:
        if not callable(value):
            return value
        if self.asynchronous or inspect.iscoroutinefunction(value):
            return await settled(value())
        return await in_thread(value, name=f"{self._name}-conninfo")


def _endpoint_of(conninfo: str, options: Mapping[str, Any]) -> Endpoint | None:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found: dict[str, Any] = dict(conninfo_to_dict(conninfo)) if conninfo else {}
    except psycopg.Error:
        return _endpoint_in(conninfo)  # another driver's own way to say it
    found.update(options)
    host = found.get("host") or found.get("hostaddr")
    if not host and not found.get("port"):
        return None if not conninfo else Endpoint("localhost:5432", str(found.get("user") or ""))
    return Endpoint(
        f"{host or 'localhost'}:{found.get('port') or 5432}", str(found.get("user") or "")
    )


def _endpoint_in(text: str) -> Endpoint:
    """The endpoint in a URL that libpq does not take; it names leases, so no password is in it."""
    try:
        url = urlsplit(text)
        if url.hostname:
            port = f":{url.port or 5432}" if url.scheme.startswith("postgres") else ""
            port = port or (f":{url.port}" if url.port else "")
            return Endpoint(f"{url.hostname}{port}", url.username or "")
    except ValueError:
        pass  # not a URL
    if re.search(r"[=@]", text):
        return Endpoint(f"endpoint-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
    return Endpoint(text)


def _place_of(conninfo: str, options: Mapping[str, Any]) -> str:
    """A host and a database, as in "db/orders"; never a user, let alone a password."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found: dict[str, Any] = dict(conninfo_to_dict(conninfo))
    except psycopg.Error:
        return ""
    found.update(options)
    if not conninfo and not found.get("host"):
        return ""  # it is only known inside a function of the user's
    place = str(found.get("host") or "localhost")
    if found.get("port"):
        place += f":{found['port']}"
    database = found.get("dbname") or found.get("database")
    return f"{place}/{database}" if database else place
