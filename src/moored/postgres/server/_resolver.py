"""How to reach the server: found by trial, and remembered.

libpq knows most of it: `sslmode`, from disable to verify-full, and the addresses of a name, one
after the other. Two things it does not: a server that hangs up when it is asked for TLS, and a name
with IPv6 addresses to which no road leads, where each try takes its whole time. What was found out
is kept for the next connections; addresses are not: a name may lead elsewhere tomorrow. Of two
kinds of addresses, the one that works is looked for again when it was long ago: a road may break.

TLS is given up only for a server that hangs up when it is asked for it, takes the same without, and
then still hangs up: one that was away for a moment is not spoken to in the clear ever after.
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
from ._connect import connect
from ._faults import diagnose

__all__ = ["Resolver", "Way"]

log = logging.getLogger("moored.postgres")

#: How long one trial may take while there is another way to try.
TRIAL = 5.0
#: For how long the better of two kinds of addresses is taken for granted. Whoever connects after
#: that was cut off, or opens a new connection now and then: one more does not matter.
KEPT = 30.0
#: With these, a connection without TLS is better than none.
_MAY_BE_PLAIN = ("allow", "prefer")
#: What libpq says of a server that does not know what to do with the question for TLS.
_TLS_REFUSED = (
    "ssl syscall error",
    "ssl error: unexpected eof",
    "server closed the connection unexpectedly",
    "received unexpected response to ssl",
    "received invalid response to ssl",
)
#: Where another address of the same name may do better.
_UNREACHABLE = ("connection_timeout", "connection_refused", "connection_closed")


class Way(NamedTuple):
    """What was found out about a server."""

    #: Whether it is reached without TLS although that was asked for.
    plain: bool = False
    #: Whether only its IPv4 addresses are used.
    ipv4: bool = False


class _Known(NamedTuple):
    way: Way
    #: By the loop's clock.
    until: float


class Resolver:
    """Finds out how a server can be reached, for each URL, and remembers it."""

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._known: dict[str, _Known] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def conninfo(self, url: str) -> str:
        """The connection string to use; the first time, after a trial."""
        async with self._locks.setdefault(url, asyncio.Lock()):
            known = self._known.get(url)
            if known is None or known.until < asyncio.get_running_loop().time():
                known = self._known[url] = await self._try(url)
        return await self._with(url, known.way)

    def forget(self) -> None:
        """Try again the next time: the server may be another one."""
        self._known.clear()

    async def _try(self, url: str) -> _Known:
        """The first way that works; raises the first way's error if none does."""
        server = _ServerUrl.of(url)
        both = server.named and await self._has_both_families(server.host)
        first: Exception | None = None
        ways = [Way()]
        for way in ways:  # which grows meanwhile
            try:
                await self._dial(url, way, hurry=both and not way.ipv4)
            except (psycopg.Error, OSError) as error:
                first = first or error
                others = self._others(way, error, both=both, may_be_plain=server.may_be_plain)
                if others is None:
                    raise
                ways += [other for other in others if other not in ways]
                continue
            way = await self._with_tls_after_all(url, way)
            if way != Way():
                because = "" if first is None else f": {diagnose(first).message}"
                log.warning("the server is reached %s%s", _words(way), because)
            kept = KEPT if both else math.inf
            return _Known(way, asyncio.get_running_loop().time() + kept)
        assert first is not None
        raise first

    def _others(
        self, way: Way, error: Exception, *, both: bool, may_be_plain: bool
    ) -> list[Way] | None:
        """What to try after this one failed; None if the server itself has said no."""
        text = str(error).lower()
        hung_up = any(words in text for words in _TLS_REFUSED)
        unreachable = diagnose(error).type in _UNREACHABLE
        if not (hung_up or unreachable):
            return None
        others = [way._replace(ipv4=True)] if both else []
        if hung_up and may_be_plain:
            others.append(way._replace(plain=True))
        return others

    async def _with_tls_after_all(self, url: str, way: Way) -> Way:
        """The same way, with TLS if that works by now: the server may have been away before."""
        encrypted = way._replace(plain=False)
        if way == encrypted:
            return way
        try:
            await self._dial(url, encrypted, hurry=True)
        except (psycopg.Error, OSError):
            return way
        return encrypted

    async def _has_both_families(self, host: str) -> bool:
        found = {family for family, *_ in await self._addresses(host)}
        return {socket.AF_INET, socket.AF_INET6} <= found

    async def _addresses(self, host: str) -> list[Any]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return []  # the driver says it better

    async def _with(self, url: str, way: Way) -> str:
        changes: dict[str, Any] = {"sslmode": "disable"} if way.plain else {}
        if way.ipv4:
            host = _ServerUrl.of(url).host
            found = await self._addresses(host)
            v4 = [address[0] for family, *_, address in found if family == socket.AF_INET]
            if v4:
                # The name stays: TLS checks it, and providers choose by it.
                changes |= {"host": ",".join([host] * len(v4)), "hostaddr": ",".join(v4)}
        return make_conninfo(url, **changes) if changes else url

    async def _dial(self, url: str, way: Way, *, hurry: bool) -> None:
        limit = min(TRIAL, self._timeout) if hurry else self._timeout
        conninfo = await self._with(url, way)
        async with asyncio.timeout(limit):
            conn = await connect(conninfo, connect_timeout=max(2, round(limit)))
        await conn.close()


class _ServerUrl(NamedTuple):
    """What a URL says about its server, together with the environment and libpq's defaults."""

    host: str
    #: Whether the host is one name, which may have several addresses.
    named: bool
    #: Whether a connection without TLS is better than none.
    may_be_plain: bool

    @classmethod
    def of(cls, url: str) -> _ServerUrl:
        given = _read(url)
        every = {**_defaults(), **given}
        host = str(every.get("host") or "")
        local = not host or host.startswith(("/", "@"))
        # What a service file says is known to libpq alone; and who names the system's roots
        # without a mode gets verify-full.
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
        said = SECRETS.hide(str(error).strip())
        if "percent-encoded" in said:
            said += " (a percent sign is written %25)"
        raise ConfigurationError(f"the URL cannot be read: {said}") from None


def _defaults() -> dict[str, str]:
    """What libpq takes for what the URL does not say."""
    known = psycopg.pq.Conninfo.get_defaults()
    return {each.keyword.decode(): each.val.decode() for each in known if each.val}


def _words(way: Way) -> str:
    parts = ["without TLS"] if way.plain else []
    parts += ["by IPv4 alone"] if way.ipv4 else []
    return " and ".join(parts)
