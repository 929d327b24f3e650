"""Requests to Milvus: tokens, Connect() greetings, and the answers of a former primary.

The server is a real gRPC server with Milvus's service, so that a test can read its requests and
choose its answers.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc  # type: ignore[import-untyped]
import pymilvus  # type: ignore[import-untyped]
import pytest
from pymilvus.grpc_gen import common_pb2  # type: ignore[import-untyped]

from moored.rpc import Member, TokenCredentials, Topology
from moored.rpc.milvus import (
    AsyncMilvusClient,
    AsyncMilvusManager,
    MilvusClient,
    MilvusManager,
    MilvusRefused,
    milvus_probe,
)
from moored.rpc.milvus._wire import _refusals

from .milvus_service import CALLERS, LIMIT, VIOLATION, Server

SECRET = "user:correct horse"


class Moves:
    """Two members; `move()` makes the other one the primary."""

    def __init__(self, first: Server, second: Server) -> None:
        self._first = first
        self._second = second
        self._moved = False

    def move(self) -> None:
        """Move the primary; the old one refuses writes from now on."""
        self._first.service.moved = self._moved = True

    def topology(self) -> Topology:
        one, two = (1, 3) if self._moved else (3, 1)
        members = (Member("a", self._first.uri, one), Member("b", self._second.uri, two))
        return Topology(2 if self._moved else 1, members)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def other() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def signature(token: str = SECRET) -> str:
    return base64.b64encode(token.encode()).decode()


# -- identity ------------------------------------------------------------


def test_call_carries_token_identifier_and_database(server: Server) -> None:
    with MilvusManager() as manager:
        client = MilvusClient(server.uri, token=SECRET, db_name="books", manager=manager)
        assert client.get_server_version() == "1"
    assert server.service.greetings[0]["authorization"] == signature()
    (seen,) = server.service.calls
    assert (seen["authorization"], seen["identifier"], seen["dbname"]) == (
        signature(),
        "1001",
        "books",
    )


async def test_call_of_asyncio_carries_token_identifier_and_database(server: Server) -> None:
    async with AsyncMilvusManager() as manager:
        client = AsyncMilvusClient(
            server.uri, user="user", password="correct horse", db_name="books", manager=manager
        )
        assert await client.get_server_version() == "1"
    assert server.service.greetings[0]["authorization"] == signature()
    (seen,) = server.service.calls
    assert (seen["authorization"], seen["identifier"], seen["dbname"]) == (
        signature(),
        "1001",
        "books",
    )


def test_replaced_token_is_used(server: Server) -> None:
    rotating = TokenCredentials("old", encode=signature)
    with MilvusManager(credentials=lambda config: rotating) as manager:
        client = MilvusClient(server.uri, manager=manager)
        rotating.replace("new")
        client.get_server_version()
    assert server.service.greetings[0]["authorization"] == signature("old")
    assert server.service.calls[0]["authorization"] == signature("new")


def test_token_refused_at_the_greeting_is_fetched_again(server: Server) -> None:
    server.service.accepts = signature("new")
    expired = TokenCredentials("old", encode=signature, fetch=lambda: "new")
    with MilvusManager(credentials=lambda config: expired) as manager:
        MilvusClient(server.uri, manager=manager).get_server_version()
    sent = [seen["authorization"] for seen in server.service.greetings]
    assert sent == [signature("old"), signature("new")]
    assert server.service.calls[0]["authorization"] == signature("new")


def test_every_generation_greets(server: Server) -> None:
    with MilvusManager() as manager:
        client = MilvusClient(server.uri, manager=manager)
        error = pymilvus.MilvusException(1, VIOLATION)
        assert manager.handle_error(client._channel, error, timeout=LIMIT)
        client.get_server_version()
    assert server.service.calls[0]["identifier"] == "1002"


def test_each_channel_of_a_pool_greets(server: Server) -> None:
    with MilvusManager(channels=2) as manager:
        client = MilvusClient(server.uri, manager=manager)
        for _ in range(4):
            client.get_server_version()
        assert len(server.service.greetings) == 2
        assert {seen["identifier"] for seen in server.service.calls} <= {"1001", "1002"}


async def test_each_channel_of_a_pool_of_asyncio_greets(server: Server) -> None:
    async with AsyncMilvusManager(channels=2) as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        await asyncio.gather(*(client.get_server_version() for _ in range(4)))
        assert len(server.service.greetings) == 2
        assert {seen["identifier"] for seen in server.service.calls} == {"1001", "1002"}


def test_server_without_greetings_is_supported(server: Server) -> None:
    server.service.refuse = grpc.StatusCode.UNIMPLEMENTED
    with MilvusManager() as manager:
        client = MilvusClient(server.uri, manager=manager)
        server.service.refuse = None
        assert client.get_server_version() == "1"
    assert "identifier" not in server.service.calls[0]


def test_server_that_is_not_ready_is_waited_for(server: Server) -> None:
    server.service.greeting = common_pb2.Status(code=1, reason="service not ready")
    with MilvusManager() as manager:
        ready = threading.Timer(0.5, setattr, (server.service, "greeting", common_pb2.Status()))
        ready.start()
        assert MilvusClient(server.uri, manager=manager).get_server_version() == "1"
        assert len(server.service.greetings) > 1


# -- refused tokens ------------------------------------------------------------


def test_wrong_token_fails_immediately(server: Server) -> None:
    server.service.refuse = grpc.StatusCode.UNAUTHENTICATED
    with MilvusManager() as manager:
        for _ in range(3):
            with pytest.raises(MilvusRefused, match="UNAUTHENTICATED: auth check failure"):
                MilvusClient(server.uri, token=SECRET, manager=manager)
        assert len(server.service.greetings) == 1, "the manager reconnected"
    gc.collect()
    assert not _refusals, "notes of a closed channel remain"


async def test_wrong_token_of_asyncio_fails_immediately(server: Server) -> None:
    server.service.refuse = grpc.StatusCode.UNAUTHENTICATED
    async with AsyncMilvusManager() as manager:
        for _ in range(3):
            with pytest.raises(MilvusRefused, match="UNAUTHENTICATED: auth check failure"):
                await AsyncMilvusClient(server.uri, token=SECRET, manager=manager).list_aliases("a")
        assert len(server.service.greetings) == 1
    gc.collect()
    assert not _refusals


async def test_probe_needs_no_token(server: Server) -> None:
    server.service.refuse = grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(server.address) as channel:
        assert await milvus_probe(channel)
        server.stop()
        assert not await milvus_probe(channel)


def test_token_is_shown_nowhere(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with MilvusManager() as manager:
        client = MilvusClient(server.uri, token=SECRET, manager=manager)
        client.get_server_version()
        server.service.refuse = grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            client.get_server_version()
        server.stop()
        with pytest.raises((grpc.RpcError, pymilvus.MilvusException)) as unsent:
            client.get_server_version(timeout=1.0)
        shown = [repr(client), repr(client._handler), repr(manager.get_stats()), caplog.text]
        shown += [repr(caught.value), repr(unsent.value), repr(manager.recorder.events())]
    for text in shown:
        for secret in ("correct horse", signature()):
            assert secret not in text


# -- a former primary ------------------------------------------------------------


def test_refused_writes_leave_the_former_primary_once(server: Server, other: Server) -> None:
    moves = Moves(server, other)
    with MilvusManager(fetch_topology=moves.topology) as manager:
        client = MilvusClient(server.uri, manager=manager)
        client.drop_alias("a")
        moves.move()
        ready, failures = threading.Barrier(CALLERS), list[BaseException]()

        def write() -> None:
            ready.wait()
            try:
                client.drop_alias("a", timeout=LIMIT)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not failures
        (line,) = manager.get_stats()["connections"]
        assert (line["generation"], line["address"]) == (2, other.address)
        assert 1 <= server.service.violations <= CALLERS


async def test_refused_writes_of_coroutines_leave_the_former_primary_once(
    server: Server, other: Server
) -> None:
    moves = Moves(server, other)
    async with AsyncMilvusManager(fetch_topology=moves.topology) as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        await client.drop_alias("a")
        moves.move()
        calls = (client.drop_alias("a", timeout=LIMIT) for _ in range(CALLERS))
        await asyncio.gather(*calls)
        (line,) = manager.get_stats()["connections"]
        assert (line["generation"], line["address"]) == (2, other.address)
        assert 1 <= server.service.violations <= CALLERS


def test_late_refusal_of_the_former_primary_changes_nothing(server: Server, other: Server) -> None:
    moves = Moves(server, other)
    other.service.go_on.set()
    with (
        MilvusManager(fetch_topology=moves.topology) as manager,
        ThreadPoolExecutor() as pool,
    ):
        client = MilvusClient(server.uri, manager=manager)
        late = pool.submit(client.drop_alias, "late", timeout=LIMIT)
        assert server.service.held.acquire(timeout=LIMIT)
        moves.move()
        client.drop_alias("a", timeout=LIMIT)
        server.service.go_on.set()
        late.result(LIMIT)
        (line,) = manager.get_stats()["connections"]
        assert (line["generation"], server.service.violations) == (2, 2)


async def test_late_refusal_of_the_former_primary_changes_nothing_for_coroutines(
    server: Server, other: Server
) -> None:
    moves = Moves(server, other)
    other.service.go_on.set()
    async with AsyncMilvusManager(fetch_topology=moves.topology) as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        late = asyncio.create_task(client.drop_alias("late", timeout=LIMIT))
        assert await asyncio.to_thread(server.service.held.acquire, timeout=LIMIT)
        moves.move()
        await client.drop_alias("a", timeout=LIMIT)
        server.service.go_on.set()
        await late
        (line,) = manager.get_stats()["connections"]
        assert (line["generation"], server.service.violations) == (2, 2)


@pytest.mark.parametrize("alone", [True, False])
def test_refused_write_with_an_unchanged_primary_is_sent_once(server: Server, alone: bool) -> None:
    server.service.moved = True
    topology = None if alone else lambda: [Member("one", server.uri)]
    with MilvusManager(fetch_topology=topology) as manager:
        client = MilvusClient(server.uri, manager=manager)
        with pytest.raises(pymilvus.MilvusException, match="REPLICATE_VIOLATION"):
            client.drop_alias("a", timeout=LIMIT)
        (line,) = manager.get_stats()["connections"]
        assert (line["generation"], server.service.violations) == (1, 1)


@pytest.mark.parametrize("alone", [True, False])
async def test_refused_write_of_a_coroutine_with_an_unchanged_primary_is_sent_once(
    server: Server, alone: bool
) -> None:
    server.service.moved = True
    topology = None if alone else lambda: [Member("one", server.uri)]
    async with AsyncMilvusManager(fetch_topology=topology) as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        with pytest.raises(pymilvus.MilvusException, match="REPLICATE_VIOLATION"):
            await client.drop_alias("a", timeout=LIMIT)
        (line,) = manager.get_stats()["connections"]
        assert (line["generation"], server.service.violations) == (1, 1)


def test_first_call_after_a_restart_greets(server: Server) -> None:
    """gRPC reconnects the same channel by itself: its old identifier is invalid."""
    with MilvusManager() as manager:
        client = MilvusClient(server.uri, manager=manager)
        client.get_server_version()
        server.stop()
        again = Server(server.address)
        client.get_server_version(timeout=LIMIT)
        assert len(again.service.greetings) == 1
        again.stop()


async def test_first_call_of_a_coroutine_after_a_restart_greets(server: Server) -> None:
    async with AsyncMilvusManager() as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        await client.get_server_version()
        await asyncio.to_thread(server.stop)
        again = await asyncio.to_thread(Server, server.address)
        await client.get_server_version(timeout=LIMIT)
        assert len(again.service.greetings) == 1
        await asyncio.to_thread(again.stop)
