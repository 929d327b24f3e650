"""A store at the end of a bad line: requests and answers take their time, get lost, come late.

What the store does, it does on its own host: a client that is killed after it has sent a request
does not take the request back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moored.leases import Grant, Held, MemoryStore, Request, StoreUnavailable, Taken
from moored.testing import Sim

__all__ = ["BadLine", "Weather"]

T = TypeVar("T")


@dataclass
class Weather:
    """How bad the line is now; all lines of a scenario share it."""

    #: Seconds that a request takes to the store, and its answer back: from and to.
    there: tuple[float, float] = (0.001, 0.01)
    back: tuple[float, float] = (0.001, 0.01)
    #: How likely it is that a request never arrives, or that its answer does not.
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    #: Connections are refused: the client knows at once that nothing was done.
    refused: bool = False


class BadLine:
    """One client's way to a store that many share."""

    def __init__(self, store: MemoryStore, sim: Sim, weather: Weather) -> None:
        self._store = store
        self._sim = sim
        self._weather = weather
        self._context = sim.host("store").process.context()

    async def open(self) -> None:
        """Ask whether it is there."""
        await self._ask(self._store.open)

    async def close(self) -> None:
        """Nothing to do."""

    async def acquire(self, request: Request) -> Grant | None:
        """As the store."""
        return await self._ask(lambda: self._store.acquire(request))

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """As the store."""
        return await self._ask(lambda: self._store.renew(requests))

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """As the store."""
        return await self._ask(lambda: self._store.release(requests))

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """As the store."""
        return await self._ask(lambda: self._store.take(key, rate=rate, burst=burst, tokens=tokens))

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """As the store."""
        return await self._ask(lambda: self._store.held(key))

    async def _ask(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        weather, loop = self._weather, self._sim.loop
        if weather.refused:
            await asyncio.sleep(self._sim.random(*weather.there))
            raise StoreUnavailable("connection refused")
        answer: asyncio.Future[T] = loop.create_future()
        if not self._chance(weather.lost_requests):
            delay = self._sim.random(*weather.there)
            loop.call_later(delay, self._arrive, call, answer, context=self._context)
        return await answer

    def _arrive(
        self, call: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]
    ) -> None:
        result = _run(call())
        if not self._chance(self._weather.lost_answers):
            delay = self._sim.random(*self._weather.back)
            self._sim.loop.call_later(delay, _answer, answer, result, context=self._context)

    def _chance(self, probability: float) -> bool:
        return self._sim.rng.random() < probability


def _run(work: Coroutine[Any, Any, T]) -> T:
    """A coroutine that never waits, to its end."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the store in memory does not wait")


def _answer(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)
