"""Repeats whole transactions after serialization conflicts."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, overload

from moored.kernel import Backoff, BackoffExhausted, refuse

from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._sqlstate import Meaning, meaning_of

__all__ = ["retry_transaction"]

C = TypeVar("C")
T = TypeVar("T")


@overload
def retry_transaction(
    pool: AsyncConnectionPool[C],
    work: Callable[[C], Awaitable[T]],
    *,
    tries: int = ...,
    start: float = ...,
    max: float = ...,
    jitter: float = ...,
) -> Coroutine[Any, Any, T]: ...


@overload
def retry_transaction(
    pool: ConnectionPool[C],
    work: Callable[[C], T],
    *,
    tries: int = ...,
    start: float = ...,
    max: float = ...,
    jitter: float = ...,
) -> T: ...


def retry_transaction(
    pool: Any,
    work: Callable[[Any], Any],
    *,
    tries: int = 5,
    start: float = 0.1,
    max: float = 5.0,  # noqa: A002 - the kernel's word
    jitter: float = 0.25,
) -> Any:
    """Run a transaction, and repeat it after a conflict with a concurrent one.

    `work` gets a connection and does the whole transaction, including its reads; this function
    commits. The transaction is repeated after SQLSTATE 40001 (or, on Aurora DSQL, OC000 or OC001),
    also at the commit. Any other error, and the last conflict, is raised unchanged. With a pool for
    asyncio, `work` is a coroutine function and the result must be awaited.

    :param tries: how often the transaction is run at most.
    :param start: seconds before the second try; the wait doubles with each try.
    :param max: the longest wait, in seconds.
    :param jitter: the part of each wait that is random, more or less.
    """
    refuse("retry_transaction", [] if tries >= 1 else [f"tries={tries!r} must be at least 1"])
    if isinstance(pool, ConnectionPool) and inspect.iscoroutinefunction(work):
        raise TypeError(
            f"{work!r} is a coroutine function, but the pool is for threads: nothing was done"
        )
    clock = pool.reservoir.clock
    backoff = Backoff(start, max, jitter=jitter, max_attempts=tries, clock=clock)
    if isinstance(pool, AsyncConnectionPool):
        return _retry_async(pool, work, backoff)
    return _retry(pool, work, backoff)


async def _retry_async(pool: Any, work: Callable[[Any], Any], backoff: Backoff) -> Any:
    while True:
        try:
            async with pool.connection() as conn:
                return await work(conn)
        except Exception as error:
            await asyncio.sleep(_wait_after(error, backoff))


def _retry(pool: Any, work: Callable[[Any], Any], backoff: Backoff) -> Any:
    while True:
        try:
            with pool.connection() as conn:
                return work(conn)
        except Exception as error:
            time.sleep(_wait_after(error, backoff))


def _wait_after(error: Exception, backoff: Backoff) -> float:
    """Return the wait before the next try; raise the error if there is none."""
    if meaning_of(error) is Meaning.CONFLICT:
        try:
            return backoff.fail()
        except BackoffExhausted:
            pass  # raised below: here the error would get another `__context__`
    raise error
