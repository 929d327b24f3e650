"""Find out by trial how to reach the server, and remember it.

libpq handles most cases: every `sslmode`, and the addresses of a name, one after the other. It does
not handle a server that closes the connection on a TLS request, nor a name with unreachable IPv6
addresses, where each attempt takes its full timeout, nor a pooler that refuses `options`. The
result is remembered for later connections; addresses are not, because they may change. For a name
with IPv4 and IPv6 addresses the result expires after `KEPT` seconds, because a route may break.

TLS is given up only for a server that closes the connection on a TLS request, accepts one without
TLS, and then closes a second TLS request: a server that was down for a moment is not contacted
without TLS from then on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from moored.kernel import SECRETS

from .._errors import ConfigurationError
from .._settings import libpq_defaults
from ._connect import connect
from ._faults import diagnose

__all__ = ["Resolver", "Route"]

log = logging.getLogger("moored.postgres")

#: The timeout of one attempt while there is another route to try, in seconds.
TRIAL = 5.0
#: How long the choice between IPv4 and IPv6 is valid, in seconds. Connections are opened rarely or
#: after an outage, so one more attempt does not matter.
KEPT = 30.0
#: The values of sslmode that permit a connection without TLS.
_MAY_BE_PLAIN = ("allow", "prefer")
#: Errors of libpq for a server that does not understand a TLS request.
_TLS_REFUSED = (
    "ssl syscall error",
    "ssl error: unexpected eof",
    "server closed the connection unexpectedly",
    "received unexpected response to ssl",
    "received invalid response to ssl",
)
#: The error of a pooler for `options` in the start-up packet, also where it permits some of them.
_OPTIONS_REFUSED = "unsupported startup parameter"
#: Types of errors after which another address of the same name may succeed.
_UNREACHABLE = ("connection_timeout", "connection_refused", "connection_closed")


class Route(NamedTuple):
    """How a server is reached, if not as the URL says."""

    #: Without TLS, although sslmode prefers TLS.
    plain: bool = False
    #: Only by its IPv4 addresses.
    ipv4: bool = False
    #: Without `options`, which a pooler refuses: its server connections are shared.
    no_options: bool = False


class _Known(NamedTuple):
    route: Route
    #: When it expires, by the loop's clock.
    until: float


class Resolver:
    """Finds out how the server of a URL can be reached, and remembers it."""

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._known: dict[str, _Known] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def conninfo(self, url: str) -> str:
        """Return the connection string to use, after a trial if the route is not known."""
        async with self._locks.setdefault(url, asyncio.Lock()):
            known = self._known.get(url)
            if known is None or known.until < asyncio.get_running_loop().time():
                known = self._known[url] = await self._try(url)
        return await self._with(url, known.route)

    def forget(self) -> None:
        """Forget the known routes: the server may be another one."""
        self._known.clear()

    async def _try(self, url: str) -> _Known:
        """Return the first route that works; raise the error of the first one if none does."""
        server = _ServerUrl.of(url)
        both = server.named and await self._has_both_families(server.host)
        first: Exception | None = None
        routes = [Route()]
        for route in routes:  # extended by the loop
            try:
                await self._dial(url, route, hurry=both and not route.ipv4)
            except (psycopg.Error, OSError) as error:
                first = first or error
                others = self._others(route, error, both=both, may_be_plain=server.may_be_plain)
                if others is None:
                    raise
                routes += [other for other in others if other not in routes]
                continue
            route = await self._with_tls_after_all(url, route)
            if route != Route():
                because = "" if first is None else f": {diagnose(first).message}"
                log.warning("the server is reached %s%s", _words(route), because)
            kept = KEPT if both else math.inf
            return _Known(route, asyncio.get_running_loop().time() + kept)
        assert first is not None
        raise first

    def _others(
        self, route: Route, error: Exception, *, both: bool, may_be_plain: bool
    ) -> list[Route] | None:
        """Return the routes to try after this error; None if the server itself has refused."""
        text = str(error).lower()
        if _OPTIONS_REFUSED in text and "options" in text and not route.no_options:
            return [route._replace(no_options=True)]
        hung_up = any(words in text for words in _TLS_REFUSED)
        unreachable = diagnose(error).type in _UNREACHABLE
        if not (hung_up or unreachable):
            return None
        others = [route._replace(ipv4=True)] if both else []
        if hung_up and may_be_plain:
            others.append(route._replace(plain=True))
        return others

    async def _with_tls_after_all(self, url: str, route: Route) -> Route:
        """Return the route with TLS if that works now: the server may have been down before."""
        encrypted = route._replace(plain=False)
        if route == encrypted:
            return route
        try:
            await self._dial(url, encrypted, hurry=True)
        except (psycopg.Error, OSError):
            return route
        return encrypted

    async def _has_both_families(self, host: str) -> bool:
        found = {family for family, *_ in await self._addresses(host)}
        return {socket.AF_INET, socket.AF_INET6} <= found

    async def _addresses(self, host: str) -> list[Any]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return []  # the driver reports it when it connects

    async def _with(self, url: str, route: Route) -> str:
        changes: dict[str, Any] = {"sslmode": "disable"} if route.plain else {}
        if route.no_options:
            changes["options"] = ""  # not None: PGOPTIONS would apply
        if route.ipv4:
            host = _ServerUrl.of(url).host
            found = await self._addresses(host)
            v4 = [address[0] for family, *_, address in found if family == socket.AF_INET]
            if v4:
                # Keep the name: TLS verifies it, and some providers route by it.
                changes |= {"host": ",".join([host] * len(v4)), "hostaddr": ",".join(v4)}
        return make_conninfo(url, **changes) if changes else url

    async def _dial(self, url: str, route: Route, *, hurry: bool) -> None:
        limit = min(TRIAL, self._timeout) if hurry else self._timeout
        conninfo = await self._with(url, route)
        async with asyncio.timeout(limit):
            conn = await connect(conninfo, connect_timeout=max(2, round(limit)))
        await conn.close()


class _ServerUrl(NamedTuple):
    """The server of a URL, with the defaults of libpq and the environment."""

    host: str
    #: Whether the host is a single name, which may have several addresses.
    named: bool
    #: Whether sslmode permits a connection without TLS.
    may_be_plain: bool

    @classmethod
    def of(cls, url: str) -> _ServerUrl:
        given = _read(url)
        every = {**libpq_defaults(), **given}
        host = str(every.get("host") or "")
        local = not host or host.startswith(("/", "@"))
        # Only libpq reads the service file; and sslrootcert=system implies verify-full.
        unknown = "service" in given and "sslmode" not in given
        checked = every.get("sslrootcert") == "system"
        return cls(
            host,
            named=not local and "," not in host and not every.get("hostaddr"),
            may_be_plain=every.get("sslmode") in _MAY_BE_PLAIN
            and not (local or unknown or checked),
        )


def _read(url: str) -> dict[str, Any]:
    try:
        return dict(conninfo_to_dict(url))
    except psycopg.ProgrammingError as error:
        text = SECRETS.hide(str(error).strip())
        if "percent-encoded" in text:
            text += " (a percent sign is written %25)"
        raise ConfigurationError(f"the URL cannot be parsed: {text}") from None


def _words(route: Route) -> str:
    parts = ["without TLS"] if route.plain else []
    parts += ["by IPv4 only"] if route.ipv4 else []
    parts += ["without `options` (set them by ALTER ROLE … SET)"] if route.no_options else []
    return " and ".join(parts)
