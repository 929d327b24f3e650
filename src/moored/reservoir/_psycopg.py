"""psycopg 3, for asyncio and for threads.

What it takes to know a connection's state is local: libpq keeps it. A look at the socket tells
whether the server has hung up, and a ping is the shortest of all questions, the empty query, asked
with a time limit of its own, because a server that has vanished never answers.
"""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any, ClassVar, Literal

import psycopg
from psycopg import pq

from ._driver import Connect, Driver, State

__all__ = ["driver", "driver_for"]

_IDLE = int(pq.TransactionStatus.IDLE)
_STATES = {
    pq.TransactionStatus.IDLE: State.IDLE,
    pq.TransactionStatus.INTRANS: State.TRANSACTION,
    pq.TransactionStatus.INERROR: State.TRANSACTION,
    pq.TransactionStatus.ACTIVE: State.BUSY,
    pq.TransactionStatus.UNKNOWN: State.BROKEN,
}
#: How often a socket with something to read is read before it is believed to be alive: a farewell
#: of the server comes before the end of the stream.
_LOOKS = 3


class PsycopgDriver(Driver):
    """What psycopg's two kinds of connection have in common."""

    name: ClassVar[str] = "psycopg"
    closes_at_once: ClassVar[bool] = True

    def adopt(self, conn: Any, pool: Any) -> None:
        """Tell it about its pool: it then does not close itself at the end of `with conn`."""
        conn._pool = pool

    def clean(self, conn: Any) -> bool:
        """Whether it works and nothing is under way."""
        return conn.pgconn.transaction_status == _IDLE  # type: ignore[no-any-return]

    def state(self, conn: Any) -> State:
        """What it is in the middle of."""
        return _STATES[conn.pgconn.transaction_status]

    def is_broken(self, conn: Any) -> bool:
        """Whether it was closed, by us or by the server."""
        pgconn = conn.pgconn
        if pgconn.transaction_status != _IDLE:
            return bool(pgconn.transaction_status == pq.TransactionStatus.UNKNOWN)
        poll = select.poll()
        poll.register(pgconn.socket, select.POLLIN)
        for _ in range(_LOOKS):
            if not poll.poll(0):
                return False
            try:
                # A notice, or the server's farewell; the end of the stream is an error.
                pgconn.consume_input()
            except psycopg.OperationalError:
                return True
        return bool(pgconn.status == pq.ConnStatus.BAD)

    def interrupted(self, error: BaseException | None) -> bool:
        """Never: a connection knows whether it is in the middle of something."""
        return False

    def commit(self, conn: Any) -> Any:
        """End its transaction."""
        return conn.commit()

    def rollback(self, conn: Any) -> Any:
        """Undo its transaction."""
        return conn.rollback()

    def close(self, conn: Any) -> Any:
        """Close it, for good."""
        self.adopt(conn, None)
        # What takes no time is done at once, also when nobody awaits it.
        conn.pgconn.finish()
        return conn.close()


class ThreadsPsycopg(PsycopgDriver):
    """psycopg's connections for threads."""

    kind: ClassVar[Literal["threads"]] = "threads"

    def ping(self, conn: Any, timeout: float) -> None:
        """Ask the empty query, and wait no longer than this for the answer."""
        ends = time.monotonic() + timeout
        pgconn = conn.pgconn
        poll = select.poll()
        for events in _ask(pgconn):
            poll.register(pgconn.socket, events)
            if not poll.poll(max(0.0, ends - time.monotonic()) * 1000):
                raise psycopg.OperationalError(f"no answer to a ping within {timeout:g} s")


class AsyncPsycopg(PsycopgDriver):
    """psycopg's connections for asyncio."""

    kind: ClassVar[Literal["asyncio"]] = "asyncio"

    async def ping(self, conn: Any, timeout: float) -> None:
        """Ask the empty query, and wait no longer than this for the answer."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                for events in _ask(conn.pgconn):
                    await _ready(loop, conn.pgconn.socket, events)
        except TimeoutError:
            raise psycopg.OperationalError(f"no answer to a ping within {timeout:g} s") from None


def _ask(pgconn: pq.abc.PGconn) -> Any:
    """Ask the empty query; yields what to wait for."""
    if pgconn.pipeline_status != pq.PipelineStatus.OFF:
        raise psycopg.OperationalError("somebody has left a pipeline open")
    pgconn.send_query(b"")
    while pgconn.flush():
        yield select.POLLOUT
    while True:
        while pgconn.is_busy():
            yield select.POLLIN
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            return
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.OperationalError(result.get_error_message())


async def _ready(loop: asyncio.AbstractEventLoop, fd: int, events: int) -> None:
    ready = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = loop.add_reader, loop.remove_reader
    if events == select.POLLOUT:
        add, remove = loop.add_writer, loop.remove_writer
    add(fd, tell)
    try:
        await ready
    finally:
        remove(fd)


def driver(connection_class: Any, *, asynchronous: bool) -> Driver:
    """The default: connections of psycopg, or of a class of the user's that is one."""
    base = psycopg.AsyncConnection if asynchronous else psycopg.Connection
    chosen = base if connection_class is None else connection_class
    if not (isinstance(chosen, type) and issubclass(chosen, base)):
        raise TypeError(
            f"connection_class={chosen!r} must be a subclass of psycopg.{base.__name__}: for "
            "another driver, pass its connect function as connect="
        )
    return (AsyncPsycopg if asynchronous else ThreadsPsycopg)(chosen.connect)


def driver_for(connect: Connect, sample: Any) -> Driver | None:
    """The driver if `connect` is psycopg's, or if what it made is."""
    made = getattr(connect, "__self__", None) if sample is None else type(sample)
    if not isinstance(made, type):
        return None
    if issubclass(made, psycopg.AsyncConnection):
        return AsyncPsycopg(connect)
    return ThreadsPsycopg(connect) if issubclass(made, psycopg.Connection) else None
