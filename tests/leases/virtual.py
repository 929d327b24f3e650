"""Tests in virtual time, and a store with faults that a test controls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from moored.kernel import Clock
from moored.leases import (
    Grant,
    Held,
    Leases,
    MemoryStore,
    Policy,
    Request,
    StoreUnavailable,
    Taken,
)
from moored.testing import Sim, run_one

__all__ = ["ScriptedStore", "client", "in_virtual_time"]

T = TypeVar("T")


def in_virtual_time(test: Callable[[Sim], Awaitable[None]]) -> Callable[[], None]:
    """Turn a scenario into a test in virtual time, in asyncio's order and in random orders."""

    def run() -> None:
        run_one(test, 0, drift=False).result()
        for seed in range(1, 4):
            run_one(test, seed).result()

    # Not functools.wraps: pytest would see the scenario's parameter, and look for a fixture.
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__module__ = test.__module__
    return run


class ScriptedStore(MemoryStore):
    """The memory store, which can fail, hang, or lose its responses."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock=clock or Clock.current())
        #: The error that every call raises.
        self.error: Exception | None = None
        #: Whether calls hang: "before" or "after" they are carried out.
        self.hangs: str = ""
        #: Duration of a call, in seconds.
        self.takes = 0.0
        #: How often each method was called, and (in `batches`) with how many leases.
        self.calls: Counter[str] = Counter()
        self._waiter: asyncio.Future[None] | None = None
        self.batches: list[tuple[str, int]] = []

    def break_down(self) -> None:
        """Fail every call from now on."""
        self.error = StoreUnavailable("connection refused")

    async def called(self, name: str, times: int) -> None:
        """Wait until a method has been called this many times."""
        while self.calls[name] < times:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def _do(self, name: str, work: Awaitable[T]) -> T:
        self.calls[name] += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        try:
            if self.error is not None:
                raise self.error
            if self.hangs == "before":
                await asyncio.get_running_loop().create_future()
            if self.takes:
                await asyncio.sleep(self.takes)
            result = await work
            if self.hangs == "after":
                await asyncio.get_running_loop().create_future()
            return result
        finally:
            work.close()  # type: ignore[attr-defined]

    async def open(self) -> None:
        await self._do("open", super().open())

    async def acquire(self, request: Request) -> Grant | None:
        return await self._do("acquire", super().acquire(request))

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        self.batches.append(("renew", len(requests)))
        return await self._do("renew", super().renew(requests))

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        self.batches.append(("release", len(requests)))
        return await self._do("release", super().release(requests))

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        self.batches.append(("take", tokens))
        return await self._do("take", super().take(key, rate=rate, burst=burst, tokens=tokens))

    async def held(self, key: str | None = None) -> Sequence[Held]:
        return await self._do("held", super().held(key))


def client(store: MemoryStore, **policy: Any) -> Leases:
    """Return a client with the default policy, except for these settings."""
    return Leases(store, place="the store", service_name="orders", policy=Policy(**policy))
