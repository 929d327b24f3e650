"""The callers of rpc_recovery.py: ours and PyMilvus's, in the same outage.

Ours call once during the outage, and wait. Calls of PyMilvus fail at once during the outage, so
its callers retry every 50 ms until a call succeeds.
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

__all__ = ["Outage", "Side", "SideResult", "in_coroutines", "in_threads", "prepare", "written"]

#: Kills the server, calls back, restarts it, and returns when it listens again.
Outage = Callable[[Callable[[], object]], None]

#: The timeout of a call during the outage.
TIMEOUT = 30.0
#: Seconds between two calls of PyMilvus.
PAUSE = 0.05
ROW = [{"id": 1, "vector": [1.0, 2.0]}]


class SideResult(NamedTuple):
    """The results of one side's callers in one outage."""

    #: When the first call succeeded, by `time.perf_counter`.
    first: float
    #: Calls that failed.
    failed: int
    #: Reconnects.
    connects: int


class Side(NamedTuple):
    """The URI of one side's callers, and the collection of each."""

    uri: str
    names: list[str]


def prepare(admin: Any, prefix: str, number: int) -> list[str]:
    """Create a collection for each caller: Milvus Lite loses rows if many callers first use one."""
    schema = admin.create_schema()
    schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
    schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=2)
    names = [f"{prefix}_{each}" for each in range(number)]
    for name in names:
        admin.create_collection(name, schema=schema)
    return names


def written(admin: Any, names: list[str]) -> int:
    """Return the number of rows in the collections."""
    return sum(int(admin.get_collection_stats(name)["row_count"]) for name in names)


class _Results:
    """The results of callers, added from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = time.perf_counter() + 3 * TIMEOUT
        self._first = float("inf")
        self._failed = 0

    def answered(self) -> None:
        with self._lock:
            self._first = min(self._first, time.perf_counter())

    def failed_once(self) -> None:
        with self._lock:
            self._failed += 1

    @property
    def expired(self) -> bool:
        """Whether callers should stop retrying."""
        return time.perf_counter() > self._ends

    def result(self, connects: int) -> SideResult:
        return SideResult(self._first, self._failed, connects)


# -- threads ---------------------------------------------------------------------------------------


def in_threads(ours: Side, theirs: Side, outage: Outage) -> tuple[SideResult, SideResult]:
    """Run one outage with a thread for each collection; return the results of both sides."""
    our_results, their_results, away = _Results(), _Results(), threading.Event()
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
                our_results.failed_once()
            else:
                our_results.answered()

        def poll(name: str) -> None:
            away.wait()
            while not their_results.expired:
                try:
                    peer.upsert(name, ROW, timeout=TIMEOUT)
                except Exception:
                    their_results.failed_once()
                    time.sleep(PAUSE)
                else:
                    their_results.answered()
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
        return our_results.result(_generation(manager) - before), their_results.result(again)


def _generation(manager: Any) -> int:
    (line,) = manager.get_stats()["connections"]
    return int(line["generation"])


# -- asyncio ---------------------------------------------------------------------------------------


async def in_coroutines(ours: Side, theirs: Side, outage: Outage) -> tuple[SideResult, SideResult]:
    """Run one outage with a task for each collection; return the results of both sides."""
    our_results, their_results, away = _Results(), _Results(), asyncio.Event()
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
                our_results.failed_once()
            else:
                our_results.answered()

        async def poll(name: str) -> None:
            await away.wait()
            while not their_results.expired:
                try:
                    await peer.upsert(name, ROW, timeout=TIMEOUT)
                except Exception:
                    their_results.failed_once()
                    await asyncio.sleep(PAUSE)
                else:
                    their_results.answered()
                    return

        calls = [call(name) for name in ours.names] + [poll(name) for name in theirs.names]
        tasks = [asyncio.create_task(each) for each in calls]
        await asyncio.to_thread(outage, lambda: loop.call_soon_threadsafe(away.set))
        await asyncio.gather(*tasks)
        peers = AsyncConnectionManager.get_instance()
        again = sum(managed.recovery_gen for managed in peers._registry.values())
        await peers.close_all()
        return our_results.result(_generation(manager) - before), their_results.result(again)
