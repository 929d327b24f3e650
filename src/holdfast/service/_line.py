"""One line to PostgreSQL, each act within a time; the only place here that knows the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import psycopg

from ._errors import DatabaseUnreachable
from ._redact import place_of

__all__ = ["Line"]

T = TypeVar("T")


class Line:
    """An open connection that is asked, now and then, whether the server still answers.

    Every failure is a `DatabaseUnreachable`.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], place: str) -> None:
        self._connection = connection
        #: Where it leads, as in "db:5432/orders".
        self.place = place
        #: The version of the server.
        self.version = connection.info.parameter_status("server_version") or "of unknown version"

    @classmethod
    async def dial(cls, url: str, *, timeout: float) -> Line:
        """Open a line."""
        place = place_of(url)
        return cls(await _translated(place, _connect(url, timeout)), place)

    async def ask(self, *, timeout: float) -> None:
        """Have the server answer."""
        await _translated(self.place, self._ask(timeout))

    async def rest(self, seconds: float) -> None:
        """Do nothing for a while; a line that breaks meanwhile ends it at once."""
        await _translated(self.place, self._listen(seconds))

    async def close(self) -> None:
        """Close the line."""
        await self._connection.close()

    async def _ask(self, timeout: float) -> None:
        asking = asyncio.ensure_future(self._connection.execute("select 1"))
        try:
            answered, _ = await asyncio.wait({asking}, timeout=timeout)
        finally:
            if not asking.done():
                # Not cancelled: the driver would ask a silent server, for many seconds more, to
                # cancel the query.
                self._hang_up()
                await asyncio.wait({asking})
                asking.exception()
        if not answered:
            raise TimeoutError
        asking.result()

    async def _listen(self, seconds: float) -> None:
        async for _ in self._connection.notifies(timeout=seconds):
            pass

    def _hang_up(self) -> None:
        """End the line from below; whoever waits on it is told at once."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.pgconn.socket)) as line,
        ):
            line.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        state = "closed" if self._connection.closed else "open"
        return f"<Line to {self.place}: PostgreSQL {self.version}, {state}>"


async def _connect(url: str, timeout: float) -> psycopg.AsyncConnection[Any]:
    async with asyncio.timeout(timeout):
        return await psycopg.AsyncConnection.connect(
            url, autocommit=True, fallback_application_name="holdfast"
        )


async def _translated(place: str, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (psycopg.Error, OSError) as error:  # of which TimeoutError is one
        reason = _reason(error)
    # Raised out here, without the driver's error: that one keeps its frames alive, and with them a
    # half-open connection, for as long as somebody remembers the failure.
    message = f"PostgreSQL at {place} does not answer: {reason}"
    raise DatabaseUnreachable(message, reason=reason)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    line = str(error).strip().partition("\n")[0].rstrip(".")
    for where in ("connection failed: ", "consuming input failed: "):
        line = line.removeprefix(where)
    return line or type(error).__name__
