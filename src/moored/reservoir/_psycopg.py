"""psycopg 3, for asyncio and for threads.

What it takes to know a connection's state is local: libpq keeps it. A look at the socket tells
whether the server has hung up, and a ping is the shortest of all questions, the empty query. What
the pool itself asks has a time limit, because a server that has vanished never answers; psycopg's
own methods have none.
"""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any, ClassVar, Literal, get_origin

import psycopg
from psycopg import pq, waiting
from psycopg.abc import PQGen
from psycopg.waiting import Wait

from ._driver import Connect, Driver, DriverState

__all__ = ["driver", "driver_for"]

_IDLE = int(pq.TransactionStatus.IDLE)
_STATES = {
    pq.TransactionStatus.IDLE: DriverState.IDLE,
    pq.TransactionStatus.INTRANS: DriverState.TRANSACTION,
    pq.TransactionStatus.INERROR: DriverState.TRANSACTION,
    pq.TransactionStatus.ACTIVE: DriverState.BUSY,
    pq.TransactionStatus.UNKNOWN: DriverState.BROKEN,
}
#: Results that go on until the application has sent or read all of its data.
_COPY = (pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH)
#: How often a socket with something to read is read before it is believed to be alive: a farewell
#: of the server comes before the end of the stream.
_LOOKS = 3
#: Seconds between two looks at the time while a thread waits for an answer.
_INTERVAL = 0.1


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

    def state(self, conn: Any) -> DriverState:
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

    def _talk(self, conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> Any:
        """Hold a conversation with the server, for so long at most."""
        raise NotImplementedError

    def ping(self, conn: Any, timeout: float) -> Any:
        """Ask the empty query, and wait no longer than this for the answer."""
        return self._talk(conn, _ask(conn.pgconn), "ping", timeout)

    def rollback(self, conn: Any, timeout: float) -> Any:
        """Undo its transaction."""
        return self._talk(conn, conn._rollback_gen(), "ROLLBACK", timeout)

    def interrupted(self, error: BaseException | None) -> bool:
        """Never: a connection knows whether it is in the middle of something."""
        return False

    def commit(self, conn: Any) -> Any:
        """End its transaction."""
        return conn.commit()

    def cut(self, conn: Any) -> None:
        """Close its socket at once, so that it says that it is closed."""
        if conn.pgconn.transaction_status != pq.TransactionStatus.ACTIVE:
            conn.pgconn.finish()

    def close(self, conn: Any) -> Any:
        """Close it, for good."""
        self.adopt(conn, None)
        # What takes no time is done at once, also when nobody awaits it.
        conn.pgconn.finish()
        return conn.close()


class ThreadsPsycopg(PsycopgDriver):
    """psycopg's connections for threads."""

    kind: ClassVar[Literal["threads"]] = "threads"

    def _talk(self, conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> None:
        limited = _limited(conn, conversation, what, timeout)
        waiting.wait(limited, conn.pgconn.socket, interval=_INTERVAL)

    def interrupt(self, conn: Any, timeout: float) -> None:
        """Cancel what the server executes, and wait for its end."""
        try:
            conn.cancel_safe(timeout=timeout)
            # Another thread may execute it still; then that thread reads the answer.
            if conn.lock.acquire(timeout=timeout):
                try:
                    self._talk(conn, _finish(conn.pgconn), "cancel request", timeout)
                finally:
                    conn.lock.release()
        except Exception:
            conn.pgconn.finish()
            raise


class AsyncPsycopg(PsycopgDriver):
    """psycopg's connections for asyncio."""

    kind: ClassVar[Literal["asyncio"]] = "asyncio"

    async def _talk(self, conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                wanted = next(conversation)
                while True:
                    await _ready(loop, conn.pgconn.socket, wanted)
                    # A claim that all it waits for is ready does no harm.
                    wanted = conversation.send(wanted)
        except StopIteration:
            return
        except TimeoutError:
            raise _no_answer(conn, what, timeout) from None

    async def interrupt(self, conn: Any, timeout: float) -> None:
        """Cancel what the server executes, and wait for its end."""
        try:
            async with asyncio.timeout(timeout):
                await conn.cancel_safe(timeout=timeout)
                # Another task may execute it still; then that task reads the answer.
                async with conn.lock:
                    await self._talk(conn, _finish(conn.pgconn), "cancel request", timeout)
        except Exception:
            conn.pgconn.finish()
            raise


# -- conversations: psycopg's kind of generators, which yield what to wait for ---------------------
#
# A connection whose server does not answer in time is closed: what it would read next is unknown.


def _ask(pgconn: pq.abc.PGconn) -> PQGen[Any]:
    """Ask the empty query."""
    if pgconn.pipeline_status != pq.PipelineStatus.OFF:
        raise psycopg.OperationalError("somebody has left a pipeline open")
    pgconn.send_query(b"")
    while pgconn.flush():
        yield Wait.W
    for result in (yield from _results(pgconn)):
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.OperationalError(result.get_error_message())


def _finish(pgconn: pq.abc.PGconn) -> PQGen[Any]:
    """Read the rest of an answer; not in a pipeline or a COPY, which end with the connection."""
    if pgconn.pipeline_status == pq.PipelineStatus.OFF:
        yield from _results(pgconn)


def _results(pgconn: pq.abc.PGconn) -> PQGen[list[pq.abc.PGresult]]:
    found: list[pq.abc.PGresult] = []
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None or result.status in _COPY:
            return found
        found.append(result)


def _limited(conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> PQGen[Any]:
    """The same conversation, which fails when it takes too long."""
    ends = time.monotonic() + timeout
    try:
        wanted = next(conversation)
        while True:
            ready = yield wanted
            if time.monotonic() >= ends:
                raise _no_answer(conn, what, timeout)
            if ready:
                wanted = conversation.send(ready)
    except StopIteration:
        return


def _no_answer(conn: Any, what: str, timeout: float) -> Exception:
    conn.pgconn.finish()
    return psycopg.OperationalError(f"no answer to a {what} within {timeout:g} s")


async def _ready(loop: asyncio.AbstractEventLoop, fd: int, wanted: int) -> None:
    ready = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    if wanted & Wait.R:
        loop.add_reader(fd, tell)
    if wanted & Wait.W:
        loop.add_writer(fd, tell)
    try:
        await ready
    finally:
        if wanted & Wait.R:
            loop.remove_reader(fd)
        if wanted & Wait.W:
            loop.remove_writer(fd)


def driver(connection_class: Any, *, asynchronous: bool) -> Driver:
    """The default: connections of psycopg, or of a class of the user's that is one."""
    base = psycopg.AsyncConnection if asynchronous else psycopg.Connection
    chosen = base if connection_class is None else connection_class
    # One that is generic may come with its row type, as in Connection[DictRow].
    plain = get_origin(chosen) or chosen
    if not (isinstance(plain, type) and issubclass(plain, base)):
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
