"""The callers of the recovery benchmark: ours, and PyMilvus's own, in the same outage.

Ours call once, while the server is away, and wait. Those of PyMilvus fail at once in that time, so
they are let call again every 50 ms until it works.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pymilvus  # type: ignore[import-untyped]
from pymilvus.client.connection_manager import (  # type: ignore[import-untyped]
    AsyncConnectionManager,
    ConnectionManager,
)

from moored.rpc.milvus import AsyncMilvusClient, AsyncMilvusManager, MilvusClient, MilvusManager

__all__ = ["Outage", "Seen", "Side", "in_coroutines", "in_threads", "prepare", "written"]

#: Makes the server go, says so, and returns when it listens again.
Outage = Callable[[Callable[[], object]], None]

#: What a call during the outage is given.
TIMEOUT = 30.0
#: Between two calls of one that fails.
PAUSE = 0.05
ROW = [{"id": 1, "vector": [1.0, 2.0]}]


class Seen(NamedTuple):
    """What the callers of one side saw in one outage."""

    #: When the first call was answered, as `time.perf_counter` counts.
    first: float
    #: Calls that failed.
    failed: int
    #: Connections that were made again.
    connects: int


class Side(NamedTuple):
    """Where one side's callers go, and the collection of each."""

    uri: str
    names: list[str]


def prepare(keeper: Any, prefix: str, number: int) -> list[str]:
    """A collection for each caller: the server loses rows if many are the first to use one."""
    schema = keeper.create_schema()
    schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
    schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=2)
    names = [f"{prefix}_{each}" for each in range(number)]
    for name in names:
        keeper.create_collection(name, schema=schema)
    return names


def written(keeper: Any, names: list[str]) -> int:
    """How many of the rows are there."""
    return sum(int(keeper.get_collection_stats(name)["row_count"]) for name in names)


class _Notes:
    """What callers note, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = time.perf_counter() + 3 * TIMEOUT
        self._first = float("inf")
        self._failed = 0

    def answered(self) -> None:
        with self._lock:
            self._first = min(self._first, time.perf_counter())

    def refused(self) -> None:
        with self._lock:
            self._failed += 1

    @property
    def over(self) -> bool:
        """Whether there is no hope any more."""
        return time.perf_counter() > self._ends

    def seen(self, connects: int) -> Seen:
        return Seen(self._first, self._failed, connects)


# -- threads ---------------------------------------------------------------------------------------


def in_threads(ours: Side, theirs: Side, outage: Outage) -> tuple[Seen, Seen]:
    """One outage, with a thread for each collection; returns what both sides saw."""
    our_notes, their_notes, away = _Notes(), _Notes(), threading.Event()
    with MilvusManager() as manager, MilvusClient(ours.uri, manager=manager) as client:
        peer = pymilvus.MilvusClient(theirs.uri)
        for each in (client, peer):
            each.get_server_version()
        before = _generation(manager)

        def call(name: str) -> None:
            away.wait()
            try:
                client.upsert(name, ROW, timeout=TIMEOUT)
            except Exception:
                our_notes.refused()
            else:
                our_notes.answered()

        def poll(name: str) -> None:
            away.wait()
            while not their_notes.over:
                try:
                    peer.upsert(name, ROW, timeout=TIMEOUT)
                except Exception:
                    their_notes.refused()
                    time.sleep(PAUSE)
                else:
                    their_notes.answered()
                    return

        threads = [threading.Thread(target=call, args=(name,)) for name in ours.names]
        threads += [threading.Thread(target=poll, args=(name,)) for name in theirs.names]
        for thread in threads:
            thread.start()
        outage(away.set)
        for thread in threads:
            thread.join()
        peers = ConnectionManager.get_instance()
        again = sum(managed.recovery_gen for managed in peers._registry.values())
        peer.close()
        peers.close_all()
        return our_notes.seen(_generation(manager) - before), their_notes.seen(again)


def _generation(manager: Any) -> int:
    (line,) = manager.get_stats()["connections"]
    return int(line["generation"])


# -- asyncio ---------------------------------------------------------------------------------------


async def in_coroutines(ours: Side, theirs: Side, outage: Outage) -> tuple[Seen, Seen]:
    """The same with coroutines."""
    our_notes, their_notes, away = _Notes(), _Notes(), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with (
        AsyncMilvusManager() as manager,
        AsyncMilvusClient(ours.uri, manager=manager) as client,
        pymilvus.AsyncMilvusClient(theirs.uri) as peer,
    ):
        for each in (client, peer):
            await each.get_server_version()
        before = _generation(manager)

        async def call(name: str) -> None:
            await away.wait()
            try:
                await client.upsert(name, ROW, timeout=TIMEOUT)
            except Exception:
                our_notes.refused()
            else:
                our_notes.answered()

        async def poll(name: str) -> None:
            await away.wait()
            while not their_notes.over:
                try:
                    await peer.upsert(name, ROW, timeout=TIMEOUT)
                except Exception:
                    their_notes.refused()
                    await asyncio.sleep(PAUSE)
                else:
                    their_notes.answered()
                    return

        calls = [call(name) for name in ours.names] + [poll(name) for name in theirs.names]
        tasks = [asyncio.create_task(each) for each in calls]
        await asyncio.to_thread(outage, lambda: loop.call_soon_threadsafe(away.set))
        await asyncio.gather(*tasks)
        peers = AsyncConnectionManager.get_instance()
        again = sum(managed.recovery_gen for managed in peers._registry.values())
        await peers.close_all()
        return our_notes.seen(_generation(manager) - before), their_notes.seen(again)
