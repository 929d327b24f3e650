"""The memory store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest
from tests.leases.conformance import OpenStore, StoreConformance, opening, request

from moored.kernel import Clock
from moored.leases import MemoryStore
from moored.testing import stress_threads


class Movable(Clock):
    """A clock that follows the system's, and can be moved on."""

    def __init__(self) -> None:
        self.ahead = 0.0
        super().__init__(lambda: time.monotonic() + self.ahead)


class TestMemory(StoreConformance):
    ttl = 30.0

    @pytest.fixture
    def clock(self) -> Movable:
        return Movable()

    @pytest.fixture
    async def open_store(self, clock: Movable) -> AsyncIterator[OpenStore]:
        self._clock = clock
        shared = MemoryStore(clock=clock)
        async with opening(lambda: shared) as open_store:
            yield open_store

    async def pass_time(self, seconds: float) -> None:
        self._clock.ahead += seconds


async def test_keys_without_leases_are_forgotten() -> None:
    clock = Movable()
    store = MemoryStore(clock=clock)
    for n in range(5000):
        await store.acquire(request(f"key-{n}", ttl=1.0))
        await store.take(f"key-{n}", rate=10.0, burst=2, tokens=1)
        clock.ahead += 0.01
    assert len(store._keys) + len(store._limits) < 200


async def test_several_event_loops_share_a_store() -> None:
    """The clients of a named store may live in different threads."""
    store = MemoryStore()
    granted = []

    def worker(thread: int, iteration: int) -> None:
        async def use() -> None:
            wanted = request(limit=3)
            if await store.acquire(wanted) is not None:
                granted.append(wanted)
                assert len(await store.held("db")) <= 3
                assert list(await store.release([wanted])) == [True]

        asyncio.run(use())

    stress_threads(worker, threads=4, iterations=25)
    assert len(granted) >= 25
    assert list(await store.held()) == []


def test_a_forked_child_does_not_share_a_named_store() -> None:
    code = """
import asyncio, os, sys
from moored.leases import connect
async def free():
    async with connect("memory://shared") as leases:
        return await leases.acquire("db", limit=1) is not None
async def main():
    async with connect("memory://shared") as leases:
        assert await leases.acquire("db", limit=1)
        assert not await free()
        return os.fork()
child = asyncio.new_event_loop().run_until_complete(main())
if child == 0:
    os._exit(0 if asyncio.new_event_loop().run_until_complete(free()) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
