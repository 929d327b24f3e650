"""A primary that moves, with real servers: clients follow, and none calls the old one again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncConnectionManager,
    AsyncGlobalStrategy,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    GlobalStrategy,
)
from moored.rpc.milvus._config import MilvusConfig

from .handlers import FAIL, PID, eventually, loss_noticed, loss_noticed_async
from .servers import EchoServer
from .sides import aborted
from .topology_server import TopologyServer, body_of

LIMIT = 30.0
TALLY, TALLIED = "/test.Echo/Tally", "/test.Echo/Tallied"
#: The servers count the calls of all tests: each test has its own words.
_numbers = itertools.count(1)
ORDERS = ["refresher first", "error first", "killed first"]


class Cluster:
    """Two servers, and a topology server that names the primary."""

    def __init__(self, north: EchoServer, south: EchoServer) -> None:
        self.north = north
        self.south = south
        self.topology = TopologyServer()
        self.publish(1, north=3, south=1)

    def publish(self, version: int, *, north: int, south: int) -> None:
        self.topology.body = body_of(
            version, ("north", self.north.uri, north), ("south", self.south.uri, south)
        )

    @property
    def config(self) -> ConnectionConfig:
        return MilvusConfig.from_uri(f"{self.topology.url}/global-cluster")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[EchoServer, EchoServer]]:
    with EchoServer() as north, EchoServer() as south:
        yield north, south


@pytest.fixture
def cluster(servers: tuple[EchoServer, EchoServer]) -> Iterator[Cluster]:
    made = Cluster(*servers)
    with made.topology:
        yield made


def tallied(server: EchoServer) -> dict[str, int]:
    """Return the counts of a server, over a plain gRPC channel."""
    with grpc.insecure_channel(server.address) as channel:
        found: dict[str, int] = json.loads(channel.unary_unary(TALLIED)(b"", timeout=LIMIT))
    return found


class Calls:
    """Answers and errors that callers got."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.word = f"before {self.number}".encode()
        self.answers: Counter[tuple[bytes, bytes]] = Counter()
        self.errors: Counter[tuple[bytes, str]] = Counter()

    def seen(self) -> None:
        """Mark the switch: from here on, no call may reach the old primary."""
        self.word = f"after {self.number}".encode()

    def answered(self, word: bytes, pid: bytes) -> None:
        self.answers[word, pid] += 1

    def failed(self, word: bytes, error: grpc.RpcError) -> None:
        self.errors[word, error.code().name] += 1

    def enough(self, server: EchoServer) -> bool:
        return self.answers[self.word, str(server.pid).encode()] >= 50


# -- threads ---------------------------------------------------------------------------------------


def manager_of_threads(refresh_every: float) -> ConnectionManager:
    return ConnectionManager(strategy=lambda config: GlobalStrategy(refresh_every=refresh_every))


@contextlib.contextmanager
def calling(channel: grpc.Channel, threads: int = 3) -> Iterator[Calls]:
    calls, over = Calls(), threading.Event()

    def run() -> None:
        method = channel.unary_unary(TALLY)
        while not over.is_set():
            word = calls.word
            try:
                calls.answered(word, method(word, timeout=LIMIT))
            except grpc.RpcError as error:
                calls.failed(word, error)

    crowd = [threading.Thread(target=run) for _ in range(threads)]
    for thread in crowd:
        thread.start()
    try:
        yield calls
    finally:
        over.set()
        for thread in crowd:
            thread.join(LIMIT)


@pytest.mark.parametrize("order", ORDERS)
def test_clients_follow_the_primary(cluster: Cluster, order: str) -> None:
    every = 0.2 if order == "refresher first" else 300.0
    with manager_of_threads(every) as manager:
        channel = manager.get_or_create(cluster.config)
        with calling(channel) as calls:
            eventually(lambda: calls.enough(cluster.north))
            cluster.publish(2, north=1, south=3)
            trouble(cluster, order, lambda: channel.unary_unary(FAIL)(b"UNAVAILABLE", timeout=5))
            eventually(lambda: channel.generation != 1, LIMIT)
            calls.seen()
            if order == "killed first":
                cluster.north.start()
            eventually(lambda: calls.enough(cluster.south), LIMIT)
        (line,) = manager.get_stats()["connections"]
        assert (line["address"], line["generation"]) == (cluster.south.address, 2)
    check(cluster, calls, order)


def trouble(cluster: Cluster, order: str, fail: Callable[[], object]) -> None:
    if order == "error first":
        with pytest.raises(grpc.RpcError):
            fail()
    elif order == "killed first":
        cluster.north.kill()


def check(cluster: Cluster, calls: Calls, order: str) -> None:
    after = calls.word.decode()
    assert after not in tallied(cluster.north), "a call was sent to the old primary"
    assert tallied(cluster.south)[after] >= 50
    assert not [word for word, _ in calls.errors if word == calls.word], calls.errors
    if order == "killed first":
        # The call in flight of each caller, and those that fail until gRPC reports the loss in its
        # own thread: mostly none, a few on a busy machine. Callers that do not wait afterwards fail
        # hundreds of times.
        assert {code for _, code in calls.errors} <= {"UNAVAILABLE"}, calls.errors
        assert sum(calls.errors.values()) <= 30, calls.errors
    else:
        assert not calls.errors, "calls to the old primary failed"


def test_restarted_primary_is_connected_to_again(cluster: Cluster) -> None:
    with manager_of_threads(300.0) as manager:
        channel = manager.get_or_create(cluster.config)
        cluster.north.kill()
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(PID)(b"", timeout=LIMIT)
        loss_noticed(channel)
        cluster.north.start()
        new = channel.unary_unary(PID)(b"", timeout=LIMIT)
        assert new == str(cluster.north.pid).encode()
        (line,) = manager.get_stats()["connections"]
        assert (line["address"], line["generation"]) == (cluster.north.address, 2)


def test_topology_without_a_primary_is_ignored(cluster: Cluster) -> None:
    with ConnectionManager(classify=aborted) as manager:
        channel = manager.get_or_create(cluster.config)
        cluster.publish(2, north=1, south=1)
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(FAIL)(b"ABORTED", timeout=LIMIT)
        assert channel.unary_unary(PID)(b"", timeout=LIMIT) == str(cluster.north.pid).encode()
        assert_recorded(manager)
        # A new connection fails with the reason.
        with pytest.raises(ConnectFailed, match="version 2 of the topology has no primary"):
            manager.get_or_create(cluster.config, dedicated=True, timeout=1.0)


def assert_recorded(manager: ConnectionManager | AsyncConnectionManager) -> None:
    kept = [event for event in manager.recorder.events() if "topology is kept" in event.text]
    assert "version 2 of the topology has no primary" in str(kept[0].because), kept


# -- asyncio ---------------------------------------------------------------------------------------


def manager_of_tasks(refresh_every: float) -> AsyncConnectionManager:
    return AsyncConnectionManager(
        strategy=lambda config: AsyncGlobalStrategy(refresh_every=refresh_every)
    )


@contextlib.asynccontextmanager
async def calling_async(channel: grpc.aio.Channel, tasks: int = 3) -> AsyncIterator[Calls]:
    calls, over = Calls(), asyncio.Event()

    async def run() -> None:
        method = channel.unary_unary(TALLY)
        while not over.is_set():
            word = calls.word
            try:
                calls.answered(word, await method(word, timeout=LIMIT))
            except grpc.RpcError as error:
                calls.failed(word, error)

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(run())
        try:
            yield calls
        finally:
            over.set()


async def eventually_async(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("order", ORDERS)
async def test_clients_follow_the_primary_async(cluster: Cluster, order: str) -> None:
    every = 0.2 if order == "refresher first" else 300.0
    async with manager_of_tasks(every) as manager:
        channel = await manager.get_or_create(cluster.config)
        async with calling_async(channel) as calls:
            await eventually_async(lambda: calls.enough(cluster.north))
            cluster.publish(2, north=1, south=3)
            if order == "error first":
                with pytest.raises(grpc.RpcError):
                    await channel.unary_unary(FAIL)(b"UNAVAILABLE", timeout=LIMIT)
            elif order == "killed first":
                cluster.north.kill()
            await eventually_async(lambda: channel.generation != 1)
            calls.seen()
            if order == "killed first":
                await asyncio.to_thread(cluster.north.start)
            await eventually_async(lambda: calls.enough(cluster.south))
        (line,) = manager.get_stats()["connections"]
        assert (line["address"], line["generation"]) == (cluster.south.address, 2)
    await asyncio.to_thread(check, cluster, calls, order)


async def test_restarted_primary_is_connected_to_again_async(cluster: Cluster) -> None:
    async with manager_of_tasks(300.0) as manager:
        channel = await manager.get_or_create(cluster.config)
        cluster.north.kill()
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary(PID)(b"", timeout=LIMIT)
        await loss_noticed_async(channel)
        await asyncio.to_thread(cluster.north.start)
        new = await channel.unary_unary(PID)(b"", timeout=LIMIT)
        assert new == str(cluster.north.pid).encode()
        (line,) = manager.get_stats()["connections"]
        assert (line["address"], line["generation"]) == (cluster.north.address, 2)


async def test_topology_without_a_primary_is_ignored_async(cluster: Cluster) -> None:
    async with AsyncConnectionManager(classify=aborted) as manager:
        channel = await manager.get_or_create(cluster.config)
        cluster.publish(2, north=1, south=1)
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary(FAIL)(b"ABORTED", timeout=LIMIT)
        answer = await channel.unary_unary(PID)(b"", timeout=LIMIT)
        assert answer == str(cluster.north.pid).encode()
        assert_recorded(manager)
        with pytest.raises(ConnectFailed, match="version 2 of the topology has no primary"):
            await manager.get_or_create(cluster.config, dedicated=True, timeout=1.0)
