"""One attempt for many callers: callers that arrive while it is in flight share its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ._errors import FlightCancelled
from ._tasks import start_task

__all__ = ["SingleFlight"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    callers: int = 0
    cancelled: bool = False


class SingleFlight:
    """Joins concurrent attempts for the same key into one.

    - At most one attempt per key is in flight.
    - Every waiting caller gets its result, or its error (the same object); nothing is kept
      afterwards, so the next call is a new attempt.
    - A cancelled caller does not affect the others. When the last one is cancelled, the attempt is
      cancelled too, and that caller waits for its end; a new caller waits as well and then starts
      a new attempt.
    - The attempt is a task of its own, with the context variables of the caller that started it.
    """

    __slots__ = ("_flights",)

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[Any]] = {}

    async def do(self, key: Hashable, factory: Callable[[], Awaitable[T]]) -> T:
        """Join the attempt for the key, or start one with the factory, and return its outcome."""
        flight = await self._joined(key, factory)
        try:
            await asyncio.wait((flight.task,))
        finally:
            flight.callers -= 1
            if not flight.callers and not flight.task.done():
                flight.cancelled = True
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

    async def _joined(self, key: Hashable, factory: Callable[[], Awaitable[T]]) -> _Flight[T]:
        while (flight := self._flights.get(key)) is not None and flight.cancelled:
            await asyncio.wait((flight.task,))
        if flight is None:
            flight = self._start(key, factory)
        elif flight.task is asyncio.current_task():
            raise RuntimeError(f"the attempt for {key!r} waits for itself and would never end")
        flight.callers += 1
        return flight

    def _start(self, key: Hashable, factory: Callable[[], Awaitable[T]]) -> _Flight[T]:
        async def attempt() -> T:
            try:
                return await factory()
            finally:
                # Here and not in the done callback, which runs an iteration of the loop later: a
                # call in between must start a new attempt.
                self._remove(key, task)

        task = start_task(attempt(), name=f"single flight {key!r}")
        flight = self._flights[key] = _Flight(task)
        task.add_done_callback(lambda _: self._ended(key, task))
        return flight

    def _remove(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if (flight := self._flights.get(key)) is not None and flight.task is task:
            del self._flights[key]

    def _ended(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never runs its own `finally`.
        self._remove(key, task)
        if not task.cancelled():
            # Mark the error as retrieved: every caller may have been cancelled before.
            task.exception()

    @staticmethod
    def _outcome(key: Hashable, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            # A CancelledError would mean that the caller itself was cancelled.
            raise FlightCancelled(
                f"the attempt for {key!r} was cancelled, and not by its callers; "
                "call again if the result is still needed"
            )
        return task.result()
