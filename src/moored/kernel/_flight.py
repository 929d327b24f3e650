"""One attempt for many callers: those that come while it is in flight share its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from ._errors import FlightCancelled
from ._tasks import start_task

__all__ = ["SingleFlight"]

T = TypeVar("T")


class _Flight(Generic[T]):
    __slots__ = ("callers", "leaving", "task")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.callers = 0
        self.leaving = False


class SingleFlight:
    """Joins concurrent attempts at the same thing into one.

    - At most one attempt per key is under way at any time.
    - Its result, or its error (the same object), goes to every caller that waits for it; nothing
      is kept afterwards, so the next call is a new attempt.
    - A cancelled caller leaves the others alone. When the last one leaves, the attempt is
      cancelled too, and that caller waits for its end; a newcomer waits as well and starts afresh.
    - The attempt is a task of its own: it has the context variables of the caller that started it.
    """

    __slots__ = ("_flights",)

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[Any]] = {}

    async def do(self, key: Hashable, factory: Callable[[], Awaitable[T]]) -> T:
        """Join the attempt for the key, or start one with the factory, and return its outcome."""
        flight = await self._boarded(key, factory)
        try:
            await asyncio.wait((flight.task,))
        finally:
            flight.callers -= 1
            if not flight.callers and not flight.task.done():
                flight.leaving = True
                flight.task.cancel()
                await asyncio.wait((flight.task,))
        return self._outcome(key, flight.task)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    def __repr__(self) -> str:
        callers = sum(flight.callers for flight in self._flights.values())
        return f"<SingleFlight: {len(self._flights)} in flight, {callers} callers>"

    async def _boarded(self, key: Hashable, factory: Callable[[], Awaitable[T]]) -> _Flight[T]:
        while (flight := self._flights.get(key)) is not None and flight.leaving:
            await asyncio.wait((flight.task,))
        if flight is None:
            flight = self._start(key, factory)
        elif flight.task is asyncio.current_task():
            raise RuntimeError(f"the attempt for {key!r} waits for itself: it would never end")
        flight.callers += 1
        return flight

    def _start(self, key: Hashable, factory: Callable[[], Awaitable[T]]) -> _Flight[T]:
        async def attempt() -> T:
            try:
                return await factory()
            finally:
                # Not left to the callback, which runs a turn later: who asks now asks anew.
                self._landed(key, task)

        task = start_task(attempt(), name=f"single flight {key!r}")
        flight = self._flights[key] = _Flight(task)
        task.add_done_callback(lambda _: self._ended(key, task))
        return flight

    def _landed(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if (flight := self._flights.get(key)) is not None and flight.task is task:
            del self._flights[key]

    def _ended(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never comes to its own `finally`.
        self._landed(key, task)
        if not task.cancelled():
            # Marks an error as seen when every caller has left before it came.
            task.exception()

    @staticmethod
    def _outcome(key: Hashable, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            # As a CancelledError it would look to the caller as if it was cancelled itself.
            raise FlightCancelled(
                f"the attempt for {key!r} was cancelled from outside; "
                "ask again if it is still wanted"
            )
        return task.result()
