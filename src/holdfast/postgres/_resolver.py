"""How to reach the server: found by trial, and remembered.

libpq knows most of it: `sslmode`, from disable to verify-full, and the addresses of a name, one
after the other. Two things it does not: a server that hangs up when it is asked for TLS, and a name
with IPv6 addresses to which no road leads, where each try takes its whole time. What was found out
is kept for the next connections; addresses are not: a name may lead elsewhere tomorrow.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.kernel import describe

from ._faults import Verdict, diagnose

__all__ = ["Resolver", "Way"]

log = logging.getLogger("holdfast.postgres")

#: How long one trial may take while there is another way to try.
TRIAL = 5.0
#: With these, a connection without TLS is better than none.
_MAY_BE_PLAIN = (None, "allow", "prefer")
_TLS_REFUSED = (
    "ssl syscall error",
    "ssl error: unexpected eof",
    "server closed the connection unexpectedly",
    "received unexpected response to ssl",
    "received invalid response to ssl",
)


class Way(NamedTuple):
    """What was found out about a server."""

    #: Whether it is reached without TLS although that was asked for.
    plain: bool = False
    #: Whether only its IPv4 addresses are used.
    ipv4: bool = False


class Resolver:
    """Finds out how a server can be reached, once for each URL."""

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._known: dict[str, Way] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def conninfo(self, url: str) -> str:
        """The connection string to use; the first time, after a trial."""
        async with self._locks.setdefault(url, asyncio.Lock()):
            if url not in self._known:
                self._known[url] = await self._try(url)
        return await self._with(url, self._known[url])

    def forget(self) -> None:
        """Try again the next time: the server may be another one."""
        self._known.clear()

    async def _try(self, url: str) -> Way:
        """The first way that works; raises the first way's error if none does."""
        ways = await self._ways(url)
        first: BaseException | None = None
        for way in ways:
            try:
                await self._dial(await self._with(url, way), last=way == ways[-1])
            except (psycopg.Error, OSError) as error:
                first = first or error
                if not self._worth_another(error):
                    raise
                continue
            if way != Way():
                because = "" if first is None else f": {describe(first)}"
                log.warning("the server is reached %s%s", _words(way), because)
            return way
        assert first is not None
        raise first

    async def _ways(self, url: str) -> list[Way]:
        params = conninfo_to_dict(url)
        ways = [Way()]
        if await self._has_both_families(params):
            ways.append(Way(ipv4=True))
        local = str(params.get("host") or "/").startswith("/")
        if params.get("sslmode") in _MAY_BE_PLAIN and not local:
            ways += [way._replace(plain=True) for way in list(ways)]
        return ways

    async def _has_both_families(self, params: dict[str, Any]) -> bool:
        host = params.get("host")
        if not host or str(host).startswith("/") or params.get("hostaddr") or "," in str(host):
            return False
        found = {family for family, *_ in await self._addresses(str(host), params)}
        return {socket.AF_INET, socket.AF_INET6} <= found

    async def _addresses(self, host: str, params: dict[str, Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.getaddrinfo(
                host, int(params.get("port") or 5432), type=socket.SOCK_STREAM
            )
        except OSError:
            return []  # libpq says it better

    async def _with(self, url: str, way: Way) -> str:
        changes: dict[str, Any] = {"sslmode": "disable"} if way.plain else {}
        if way.ipv4:
            params = conninfo_to_dict(url)
            found = await self._addresses(str(params["host"]), params)
            v4 = [address[0] for family, *_, address in found if family == socket.AF_INET]
            # The name stays: TLS checks it, and providers choose by it.
            changes |= {"hostaddr": v4[0]} if v4 else {}
        return make_conninfo(url, **changes) if changes else url

    async def _dial(self, conninfo: str, *, last: bool) -> None:
        limit = self._timeout if last else min(TRIAL, self._timeout)
        async with asyncio.timeout(limit):
            conn = await psycopg.AsyncConnection.connect(
                conninfo, autocommit=True, connect_timeout=max(2, round(limit))
            )
        await conn.close()

    def _worth_another(self, error: BaseException) -> bool:
        """Whether another way may lead there: not if the server itself has said no."""
        text = str(error).lower()
        if any(words in text for words in _TLS_REFUSED):
            return True
        diagnosis = diagnose(error)
        return diagnosis.verdict is Verdict.RETRY and diagnosis.type in (
            "connection_timeout",
            "connection_refused",
            "connection_closed",
        )


def _words(way: Way) -> str:
    parts = ["without TLS"] if way.plain else []
    parts += ["by IPv4 alone"] if way.ipv4 else []
    return " and ".join(parts)
