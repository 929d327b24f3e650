"""The driver for psycopg 3, for asyncio and for threads.

libpq knows the state of a connection without a query, and a readable socket shows that the server
has closed it. A ping is the empty query. All queries of the pool itself have a timeout, which
psycopg's own methods lack: a server that has vanished never answers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import select
import time
import weakref
from typing import Any, ClassVar, Literal, get_origin

import psycopg
from psycopg import pq, waiting
from psycopg.abc import PQGen
from psycopg.waiting import Wait

from ._driver import Connect, Driver, DriverState

__all__ = ["driver", "driver_for"]

log = logging.getLogger("moored.reservoir")

_IDLE = int(pq.TransactionStatus.IDLE)
_STATES = {
    pq.TransactionStatus.IDLE: DriverState.IDLE,
    pq.TransactionStatus.INTRANS: DriverState.TRANSACTION,
    pq.TransactionStatus.INERROR: DriverState.TRANSACTION,
    pq.TransactionStatus.ACTIVE: DriverState.BUSY,
    pq.TransactionStatus.UNKNOWN: DriverState.BROKEN,
}
#: Results after which the application has to send or read data.
_COPY = (pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH)
#: How often a readable socket is read to find its end: a last message of the server may precede it.
_READS = 3
#: Seconds that a statement may take to end after its caller was cancelled.
_ENDS = 5.0
#: As plain numbers, because an enum's operators are slow.
_READ, _WRITE = int(Wait.R), int(Wait.W)
_EVENTS = (0, select.POLLIN, select.POLLOUT, select.POLLIN | select.POLLOUT)


class PsycopgDriver(Driver):
    """The common part of the drivers for psycopg's two kinds of connection."""

    name: ClassVar[str] = "psycopg"
    closes_at_once: ClassVar[bool] = True

    def set_pool(self, conn: Any, pool: Any) -> None:
        """Set the connection's pool: it then does not close itself at the end of `with conn`."""
        conn._pool = pool

    def clean(self, conn: Any) -> bool:
        """Whether the connection works and is idle, outside of a transaction."""
        return conn.pgconn.transaction_status == _IDLE  # type: ignore[no-any-return]

    def state(self, conn: Any) -> DriverState:
        """The state of the connection, as libpq knows it."""
        return _STATES[conn.pgconn.transaction_status]

    def busy(self, conn: Any) -> bool:
        """Whether a statement is running, as libpq knows it."""
        return bool(conn.pgconn.transaction_status == pq.TransactionStatus.ACTIVE)

    def is_broken(self, conn: Any) -> bool:
        """Whether the connection was closed, by us or by the server."""
        pgconn = conn.pgconn
        if pgconn.transaction_status != _IDLE:
            return bool(pgconn.transaction_status == pq.TransactionStatus.UNKNOWN)
        poll = select.poll()
        poll.register(pgconn.socket, select.POLLIN)
        for _ in range(_READS):
            if not poll.poll(0):
                return False
            try:
                # A notice, or the server's last message; the end of the stream is an error.
                pgconn.consume_input()
            except psycopg.OperationalError:
                return True
        return bool(pgconn.status == pq.ConnStatus.BAD)

    def _run(self, conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> Any:
        """Run a generator of psycopg's kind; raise, and close the connection, after the timeout."""
        raise NotImplementedError

    def ping(self, conn: Any, timeout: float) -> Any:
        """Send the empty query, and wait for the answer until the timeout."""
        return self._run(conn, _ping_gen(conn.pgconn), "ping", timeout)

    def rollback(self, conn: Any, timeout: float) -> Any:
        """Roll back the transaction, within the timeout."""
        # A plain ROLLBACK takes less time than psycopg's own.
        conversation = _rollback_of_psycopg(conn) or _rollback_gen(conn.pgconn)
        return self._run(conn, conversation, "ROLLBACK", timeout)

    def interrupted(self, error: BaseException | None) -> bool:
        """Never: the state of the connection shows whether a statement is running."""
        return False

    def commit(self, conn: Any) -> Any:
        """Commit the transaction."""
        return conn.commit()

    def close_socket(self, conn: Any) -> None:
        """Close the socket now, so that `conn.closed` is true, unless a statement is running."""
        if conn.pgconn.transaction_status != pq.TransactionStatus.ACTIVE:
            conn.pgconn.finish()

    def close(self, conn: Any) -> Any:
        """Close the connection instead of returning it to its pool."""
        self.set_pool(conn, None)
        # The socket is closed even if the result is never awaited.
        conn.pgconn.finish()
        return conn.close()


class ThreadsPsycopg(PsycopgDriver):
    """The driver for psycopg's connections for threads."""

    kind: ClassVar[Literal["threads"]] = "threads"

    def _run(self, conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> None:
        # Faster than psycopg's own `wait`, which cannot end at a given time.
        ends = time.monotonic() + timeout
        poll = select.poll()
        try:
            wanted = next(conversation)
            while True:
                poll.register(conn.pgconn.socket, _EVENTS[wanted])
                if not poll.poll(max(0.0, ends - time.monotonic()) * 1000):
                    raise _no_answer(conn, what, timeout)
                # It is harmless to report all wanted events as ready.
                wanted = conversation.send(wanted)
        except StopIteration:
            return

    def rollback(self, conn: Any, timeout: float) -> None:
        """Roll back the transaction, within the timeout."""
        pgconn = conn.pgconn
        if (conversation := _rollback_of_psycopg(conn)) is not None:
            self._run(conn, conversation, "ROLLBACK", timeout)
        elif pgconn.transaction_status != _IDLE:
            # Every engine of SQLAlchemy does this for each checkout: without a generator.
            pgconn.send_query(b"ROLLBACK")
            poll = select.poll()
            poll.register(pgconn.socket, select.POLLIN)
            while pgconn.is_busy() or pgconn.get_result() is not None:
                if pgconn.is_busy():
                    if not poll.poll(timeout * 1000):
                        raise _no_answer(conn, "ROLLBACK", timeout)
                    pgconn.consume_input()

    def interrupt(self, conn: Any, timeout: float) -> None:
        """Cancel the running statement, and wait until it has ended."""
        try:
            conn.cancel_safe(timeout=timeout)
            # If another thread executes the statement, that thread reads the answer.
            if conn.lock.acquire(timeout=timeout):
                try:
                    self._run(conn, _drain_gen(conn.pgconn), "cancel request", timeout)
                finally:
                    conn.lock.release()
        except Exception:
            conn.pgconn.finish()
            raise


class AsyncPsycopg(PsycopgDriver):
    """The driver for psycopg's connections for asyncio.

    They wait on the loop that runs, whichever opened them.
    """

    kind: ClassVar[Literal["asyncio"]] = "asyncio"
    any_loop: ClassVar[bool] = True

    def set_pool(self, conn: Any, pool: Any) -> None:
        """Set the connection's pool, which keeps it when its caller is cancelled."""
        super().set_pool(conn, pool)
        if pool is None:
            vars(conn).pop("wait", None)
        elif type(conn).wait is psycopg.AsyncConnection.wait:
            conn.wait = functools.partial(_wait, weakref.ref(conn))

    async def _run(self, conn: Any, conversation: PQGen[Any], what: str, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        try:
            wanted = next(conversation)
            while True:
                await _wait_socket(loop, conn.pgconn.socket, wanted, ends)
                # It is harmless to report all wanted events as ready.
                wanted = conversation.send(wanted)
        except StopIteration:
            return
        except TimeoutError:
            raise _no_answer(conn, what, timeout) from None

    async def interrupt(self, conn: Any, timeout: float) -> None:
        """Cancel the running statement, and wait until it has ended."""
        try:
            async with asyncio.timeout(timeout):
                await conn.cancel_safe(timeout=timeout)
                # If another task executes the statement, that task reads the answer.
                async with conn.lock:
                    await self._run(conn, _drain_gen(conn.pgconn), "cancel request", timeout)
        except Exception:
            conn.pgconn.finish()
            raise


async def _wait(
    conn: weakref.ref[Any], conversation: PQGen[Any], interval: float = 0.1, **options: Any
) -> Any:
    """Do as psycopg's `wait`, but leave a connection open whose caller is cancelled twice.

    In anyio's scopes, each await is cancelled. psycopg 3.3.9 then closes the connection, while the
    server executes the statement; the pool cancels it, and uses the connection again.
    """
    held = conn()
    assert held is not None  # the caller has it
    pgconn = held.pgconn
    try:
        return await waiting.wait_async(conversation, pgconn.socket, interval=interval, **options)
    except asyncio.CancelledError:
        if pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
            try:
                async with asyncio.timeout(_ENDS):
                    await held.cancel_safe(timeout=_ENDS)
                    await waiting.wait_async(conversation, pgconn.socket, interval=interval)
            except TimeoutError:
                log.warning("closing a connection whose statement was cancelled, but did not end")
                pgconn.finish()
            except psycopg.Error:
                pass  # it has ended, or the pool cancels it again
        raise


# -- generators of psycopg's kind, which yield the socket events to wait for -----------------------
#
# A connection whose server does not answer in time is closed: a late answer would be taken for the
# answer to the next query.


def _ping_gen(pgconn: pq.abc.PGconn) -> PQGen[Any]:
    """Send the empty query, and read its result."""
    if pgconn.pipeline_status != pq.PipelineStatus.OFF:
        raise psycopg.OperationalError("the connection was left in pipeline mode")
    pgconn.send_query(b"")
    while pgconn.flush():
        yield Wait.W
    for result in (yield from _results_gen(pgconn)):
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.OperationalError(result.get_error_message())


def _rollback_of_psycopg(conn: Any) -> PQGen[Any] | None:
    """Return psycopg's own rollback, if psycopg has more to do than to send a ROLLBACK.

    The public method has no timeout, so this needs private names. Where they are missing, the error
    makes the pool close the connection: what psycopg stores about it may be wrong after a ROLLBACK.
    """
    try:
        if conn._num_transactions or conn._tpc or conn._pipeline or conn._prepared.clear():
            return conn._rollback_gen()  # type: ignore[no-any-return]
    except AttributeError as error:
        raise psycopg.NotSupportedError(
            f"psycopg {psycopg.__version__} cannot roll back within a timeout ({error}): install "
            "a version that this version of Moored was tried with"
        ) from error
    return None


def _rollback_gen(pgconn: pq.abc.PGconn) -> PQGen[Any]:
    """End the transaction, if there is one."""
    if pgconn.transaction_status != _IDLE:
        pgconn.send_query(b"ROLLBACK")
        yield from _results_gen(pgconn)


def _drain_gen(pgconn: pq.abc.PGconn) -> PQGen[Any]:
    """Read and drop the remaining results; not in a pipeline, whose connection is closed anyway."""
    if pgconn.pipeline_status == pq.PipelineStatus.OFF:
        yield from _results_gen(pgconn)


def _results_gen(pgconn: pq.abc.PGconn) -> PQGen[list[pq.abc.PGresult]]:
    found: list[pq.abc.PGresult] = []
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None or result.status in _COPY:
            return found
        found.append(result)


def _no_answer(conn: Any, what: str, timeout: float) -> Exception:
    conn.pgconn.finish()
    return psycopg.OperationalError(f"no answer to a {what} within {timeout:g} s")


async def _wait_socket(loop: asyncio.AbstractEventLoop, fd: int, wanted: int, ends: float) -> None:
    """Wait until the socket is ready; raise `TimeoutError` at the given time of the loop."""
    ready = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    def set_late() -> None:
        if not ready.done():
            ready.set_exception(TimeoutError())

    timer = loop.call_at(ends, set_late)
    if wanted & _READ:
        loop.add_reader(fd, set_ready)
    if wanted & _WRITE:
        loop.add_writer(fd, set_ready)
    try:
        await ready
    finally:
        timer.cancel()
        if wanted & _READ:
            loop.remove_reader(fd)
        if wanted & _WRITE:
            loop.remove_writer(fd)


def driver(connection_class: Any, *, asynchronous: bool) -> Driver:
    """Return the driver for psycopg's connection class, or for a user's subclass of it."""
    base = psycopg.AsyncConnection if asynchronous else psycopg.Connection
    chosen = base if connection_class is None else connection_class
    # A generic class may be passed with its row type, as in Connection[DictRow].
    plain = get_origin(chosen) or chosen
    if not (isinstance(plain, type) and issubclass(plain, base)):
        raise TypeError(
            f"connection_class={chosen!r} must be a subclass of psycopg.{base.__name__}: for "
            "another driver, pass its connect function as connect="
        )
    return (AsyncPsycopg if asynchronous else ThreadsPsycopg)(chosen.connect)


def driver_for(connect: Connect, sample: Any) -> Driver | None:
    """Return psycopg's driver if `connect` is psycopg's, or if it returned such a connection."""
    made = getattr(connect, "__self__", None) if sample is None else type(sample)
    if not isinstance(made, type):
        return None
    if issubclass(made, psycopg.AsyncConnection):
        return AsyncPsycopg(connect)
    return ThreadsPsycopg(connect) if issubclass(made, psycopg.Connection) else None
