"""A store behind a faulty network: requests and responses are delayed or lost.

The store runs on its own host: a request is carried out even if its client is killed after it was
sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moored.leases import Grant, Held, MemoryStore, Request, StoreUnavailable, Taken
from moored.testing import Sim

__all__ = ["FaultyNetwork", "NetworkFaults"]

T = TypeVar("T")


@dataclass
class NetworkFaults:
    """The current faults of the network; all clients of a scenario share them."""

    #: Delay of a request, and of its response, in seconds: from and to.
    there: tuple[float, float] = (0.001, 0.01)
    back: tuple[float, float] = (0.001, 0.01)
    #: The probability that a request is lost, or its response.
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    #: Connections are refused: the client knows that nothing was done.
    refused: bool = False


class FaultyNetwork:
    """The store as one client reaches it."""

    def __init__(self, store: MemoryStore, sim: Sim, faults: NetworkFaults) -> None:
        self._store = store
        self._sim = sim
        self._faults = faults
        self._context = sim.host("store").process.context()

    async def open(self) -> None:
        """Call the store."""
        await self._ask(self._store.open)

    async def close(self) -> None:
        """Do nothing."""

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
        faults, loop = self._faults, self._sim.loop
        if faults.refused:
            await asyncio.sleep(self._sim.random(*faults.there))
            raise StoreUnavailable("connection refused")
        answer: asyncio.Future[T] = loop.create_future()
        if not self._chance(faults.lost_requests):
            delay = self._sim.random(*faults.there)
            loop.call_later(delay, self._arrive, call, answer, context=self._context)
        return await answer

    def _arrive(
        self, call: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]
    ) -> None:
        result = _run(call())
        if not self._chance(self._faults.lost_answers):
            delay = self._sim.random(*self._faults.back)
            self._sim.loop.call_later(delay, _answer, answer, result, context=self._context)

    def _chance(self, probability: float) -> bool:
        return self._sim.rng.random() < probability


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the store in memory does not wait")


def _answer(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)
