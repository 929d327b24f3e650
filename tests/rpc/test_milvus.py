"""PyMilvus clients over our managers, against a real Milvus that is killed, restarted and moved."""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pymilvus  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConfigError, ConnectFailed
from moored.rpc.milvus import (
    AsyncMilvusClient,
    AsyncMilvusManager,
    MilvusClient,
    MilvusManager,
    MilvusUnreachable,
    milvus_unavailable,
)
from moored.testing import FaultProxy

from .handlers import eventually
from .milvus_server import MilvusServer
from .topology_server import TopologyServer, body_of

CALLERS = 20
LIMIT = 120.0

_names = (f"c{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    """A running server; a test that kills it restarts it."""
    with MilvusServer(tmp_path_factory.mktemp("milvus") / "data") as server:
        yield server


@pytest.fixture
def manager() -> Iterator[MilvusManager]:
    with MilvusManager(linger=1.0) as made:
        yield made


@pytest.fixture
async def async_manager() -> AsyncIterator[AsyncMilvusManager]:
    async with AsyncMilvusManager(linger=1.0) as made:
        yield made


def line(manager: Any) -> dict[str, Any]:
    (only,) = manager.get_stats()["connections"]
    return dict(only)


def row(number: int) -> dict[str, Any]:
    return {"id": number, "vector": [float(number), 1.0, 2.0, 3.0]}


def rows(client: Any, name: str) -> list[int]:
    """Return the ids of all rows; a restarted server must load them first."""
    client.load_collection(name)
    return sorted(found["id"] for found in client.query(name, filter="id >= 0", limit=1000))


@pytest.fixture
def keeper(milvus: MilvusServer) -> Iterator[MilvusClient]:
    """A client that creates collections and reads the rows of others.

    Milvus Lite does not support what PyMilvus's asyncio client requests for a new collection.
    """
    with MilvusManager() as manager:
        yield MilvusClient(milvus.uri, manager=manager)


def collections(keeper: MilvusClient) -> list[str]:
    """Create one per caller: the server loses rows if several callers first use one together."""
    schema = keeper.create_schema()
    schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
    schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=4)
    names = [next(_names) for _ in range(CALLERS)]
    for name in names:
        keeper.create_collection(name, schema=schema)
    return names


def count(keeper: MilvusClient, name: str) -> int:
    """Return the number of rows."""
    return int(keeper.get_collection_stats(name)["row_count"])


# -- client operations ------------------------------------------------------------


def test_client_supports_the_operations_of_pymilvus(
    manager: MilvusManager, milvus: MilvusServer
) -> None:
    name = next(_names)
    with MilvusClient(milvus.uri, manager=manager) as client:
        assert isinstance(client, pymilvus.MilvusClient)
        client.create_collection(name, dimension=4)
        assert name in client.list_collections()
        assert client.insert(name, [row(number) for number in range(10)])["insert_count"] == 10
        (found,) = client.search(name, [row(3)["vector"]], limit=2)
        assert found[0]["id"] == 3
        client.delete(name, ids=[3])
        assert rows(client, name) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        batches = client.query_iterator(name, filter="id >= 0", batch_size=4)
        assert sum(len(batch) for batch in iter(batches.next, [])) == 9
        batches.close()
        client.drop_collection(name)
        assert not client.has_collection(name)
        assert line(manager)["generation"] == 1


async def test_async_client_supports_the_operations_of_pymilvus(
    async_manager: AsyncMilvusManager, milvus: MilvusServer, keeper: MilvusClient
) -> None:
    name = next(_names)
    keeper.create_collection(name, dimension=4)
    async with AsyncMilvusClient(milvus.uri, manager=async_manager) as client:
        assert isinstance(client, pymilvus.AsyncMilvusClient)
        inserted = await client.insert(name, [row(number) for number in range(10)])
        assert inserted["insert_count"] == 10
        (found,) = await client.search(name, [row(3)["vector"]], limit=2)
        assert found[0]["id"] == 3
        found = await client.query(name, filter="id in [1, 2]")
        assert sorted(each["id"] for each in found) == [1, 2]
        await client.drop_collection(name)
        assert not await client.has_collection(name)
        assert line(async_manager)["generation"] == 1


def test_client_has_the_attributes_of_pymilvus_clients(
    manager: MilvusManager, milvus: MilvusServer
) -> None:
    theirs = pymilvus.MilvusClient(milvus.uri)
    ours = MilvusClient(milvus.uri, manager=manager)
    assert vars(theirs).keys() <= vars(ours).keys()
    assert ours.is_self_hosted == theirs.is_self_hosted
    assert ours.get_server_version() == theirs.get_server_version()
    theirs.close()
    ours.close()
    with pytest.raises(pymilvus.MilvusException, match="connection"):
        ours.list_collections()
    ours.close()


async def test_async_client_has_the_attributes_of_pymilvus_clients(
    async_manager: AsyncMilvusManager, milvus: MilvusServer
) -> None:
    theirs = pymilvus.AsyncMilvusClient(milvus.uri)
    ours = AsyncMilvusClient(milvus.uri, manager=async_manager)
    # It connects at its first use.
    lists = await asyncio.gather(*(ours.list_collections() for _ in range(CALLERS)))
    assert len(lists) == CALLERS
    assert vars(theirs).keys() <= vars(ours).keys()
    await ours.close()
    with pytest.raises(pymilvus.MilvusException, match="connection"):
        await ours.list_collections()


def test_each_client_has_its_own_database(manager: MilvusManager, milvus: MilvusServer) -> None:
    name, database = next(_names), next(_names)
    one = MilvusClient(milvus.uri, manager=manager)
    one.create_database(database)
    other = MilvusClient(f"{milvus.uri}/{database}", manager=manager)
    other.create_collection(name, dimension=4)
    assert name in other.list_collections()
    assert name not in one.list_collections()
    one.use_database(database)
    assert name in one.list_collections()
    assert manager.get_stats()["total_connections"] == 1


# -- sharing ---------------------------------------------------------------------------------------


def test_clients_share_a_connection(manager: MilvusManager, milvus: MilvusServer) -> None:
    with FaultProxy("127.0.0.1", milvus.port).in_thread() as proxy:
        uri = f"http://127.0.0.1:{proxy.port}"
        clients = [MilvusClient(uri, manager=manager) for _ in range(CALLERS)]
        for client in clients:
            assert client.get_server_version()
        assert proxy.statistics().accepted == 1
        assert line(manager)["client_count"] == CALLERS
        clients.pop().close()
        for client in clients:
            assert client.get_server_version(), "closing one client closed the shared connection"
        MilvusClient(uri, token="else", manager=manager)
        assert manager.get_stats()["shared_connections"] == 2


def test_dedicated_client_shares_no_connection(
    manager: MilvusManager, milvus: MilvusServer
) -> None:
    shared = MilvusClient(milvus.uri, manager=manager)
    own = MilvusClient(milvus.uri, manager=manager, dedicated=True)
    assert manager.get_stats()["dedicated_connections"] == 1
    own.close()
    assert manager.get_stats()["dedicated_connections"] == 0
    assert shared.get_server_version()


def test_unused_connection_is_closed_after_its_linger(
    manager: MilvusManager, milvus: MilvusServer
) -> None:
    client = MilvusClient(milvus.uri, manager=manager)
    assert client.get_server_version()
    del client
    gc.collect()
    assert line(manager)["client_count"] == 0, "the connection was closed immediately"
    eventually(lambda: manager.get_stats()["total_connections"] == 0)


def test_default_manager_is_shared_in_the_process(milvus: MilvusServer) -> None:
    try:
        assert MilvusClient(milvus.uri)._manager is MilvusClient(milvus.uri)._manager
        assert isinstance(MilvusManager.get_instance(), MilvusManager)
    finally:
        MilvusManager.get_instance().close()


def test_each_loop_has_its_own_default_manager(milvus: MilvusServer) -> None:
    async def use() -> None:
        async with AsyncMilvusClient(milvus.uri) as one, AsyncMilvusClient(milvus.uri) as other:
            assert one._manager is other._manager
            assert await one.get_server_version()
        await AsyncMilvusManager.get_instance().close()

    for _ in range(5):
        asyncio.run(use())
    gc.collect()
    assert not AsyncMilvusManager._instances


# -- health ----------------------------------------------------------------------------------------


def test_healthy_idle_connection_is_kept(milvus: MilvusServer) -> None:
    with MilvusManager(idle=0.2) as manager:
        MilvusClient(milvus.uri, manager=manager)
        time.sleep(0.3)
        assert MilvusClient(milvus.uri, manager=manager).get_server_version()
        assert line(manager)["generation"] == 1


async def test_healthy_idle_connection_of_asyncio_is_kept(milvus: MilvusServer) -> None:
    async with AsyncMilvusManager(idle=0.2) as manager:
        for _ in range(2):
            async with AsyncMilvusClient(milvus.uri, manager=manager) as client:
                assert await client.get_server_version()
            await asyncio.sleep(0.3)
        assert line(manager)["generation"] == 1


# -- outages ---------------------------------------------------------------------------------------


def test_calls_during_an_outage_succeed_when_the_server_is_back(
    manager: MilvusManager, milvus: MilvusServer, keeper: MilvusClient
) -> None:
    names, failures = collections(keeper), list[BaseException]()
    with FaultProxy("127.0.0.1", milvus.port).in_thread() as proxy:
        client = MilvusClient(f"http://127.0.0.1:{proxy.port}", manager=manager)

        def write(name: str) -> None:
            try:
                client.upsert(name, [row(7)], timeout=LIMIT)
            except BaseException as error:
                failures.append(error)

        milvus.kill()
        threads = [threading.Thread(target=write, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        eventually(lambda: proxy.statistics().refused > 2)  # a while
        assert all(thread.is_alive() for thread in threads)
        before = connects(proxy)
        milvus.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not failures
        assert connects(proxy) - before == 1
        assert line(manager)["generation"] == 2
    assert [count(keeper, name) for name in names] == [1] * CALLERS


@pytest.mark.soak
async def test_coroutines_during_an_outage_succeed_when_the_server_is_back(
    async_manager: AsyncMilvusManager, milvus: MilvusServer, keeper: MilvusClient
) -> None:
    names = collections(keeper)
    async with (
        FaultProxy("127.0.0.1", milvus.port) as proxy,
        AsyncMilvusClient(f"http://127.0.0.1:{proxy.port}", manager=async_manager) as client,
    ):
        milvus.kill()
        calls = [
            asyncio.create_task(client.upsert(name, [row(7)], timeout=LIMIT)) for name in names
        ]
        await proxy.wait_until(lambda seen: seen.refused > 2)
        assert not any(call.done() for call in calls)
        before = connects(proxy)
        milvus.start()
        await asyncio.gather(*calls)
        assert connects(proxy) - before == 1
        assert line(async_manager)["generation"] == 2
    assert [count(keeper, name) for name in names] == [1] * CALLERS


def connects(proxy: FaultProxy) -> int:
    """Return how many connections have reached the server."""
    seen = proxy.statistics()
    return seen.accepted - seen.refused


def test_refused_connection_fails_in_its_timeout(manager: MilvusManager, tmp_path: Path) -> None:
    server = MilvusServer(tmp_path / "data")
    with pytest.raises(MilvusUnreachable, match=server.address) as caught:
        MilvusClient(server.uri, manager=manager, timeout=1.0)
    assert isinstance(caught.value, ConnectFailed)
    assert isinstance(caught.value, pymilvus.MilvusException)


def test_call_without_a_connection_fails_in_its_timeout(milvus: MilvusServer) -> None:
    with (
        FaultProxy("127.0.0.1", milvus.port).in_thread() as proxy,
        MilvusManager(connect_timeout=1.0) as manager,
        ThreadPoolExecutor() as pool,
    ):
        client = MilvusClient(f"http://127.0.0.1:{proxy.port}", manager=manager)
        proxy.refuse()
        proxy.reset()
        began = time.monotonic()
        limited = pool.submit(client.get_server_version, timeout=1.0)
        with pytest.raises(MilvusUnreachable, match="not sent"):
            client.get_server_version()
        error = limited.exception()
        assert time.monotonic() - began < 10.0, "PyMilvus repeated the call"
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_coroutine_without_a_connection_fails_in_its_timeout(milvus: MilvusServer) -> None:
    async with (
        FaultProxy("127.0.0.1", milvus.port) as proxy,
        AsyncMilvusManager(connect_timeout=1.0) as manager,
        AsyncMilvusClient(f"http://127.0.0.1:{proxy.port}", manager=manager) as client,
    ):
        proxy.refuse()
        proxy.reset()
        async with asyncio.timeout(10.0):
            calls = (client.get_server_version(timeout=1.0), client.get_server_version())
            errors: Any = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(errors[0], (grpc.RpcError, pymilvus.MilvusException))
        assert isinstance(errors[1], MilvusUnreachable)


# -- a primary that moves --------------------------------------------------------------------------


async def test_clients_follow_the_primary(
    milvus: MilvusServer,
    manager: MilvusManager,
    async_manager: AsyncMilvusManager,
) -> None:
    """Move the primary, and end the old one: clients of both kinds use the new one."""
    name = next(_names)
    # The old primary is a proxy in front of the new one, because a second server takes long.
    with FaultProxy("127.0.0.1", milvus.port).in_thread() as old, TopologyServer() as topology:
        address = f"127.0.0.1:{old.port}"
        topology.body = body_of(1, ("a", f"http://{address}", 3), ("b", milvus.uri, 1))
        uri = f"{topology.url}/global-cluster"
        client = await asyncio.to_thread(MilvusClient, uri, token="root:Milvus", manager=manager)
        async with AsyncMilvusClient(uri, token="root:Milvus", manager=async_manager) as coroutines:
            await asyncio.to_thread(client.create_collection, name, dimension=4)
            assert await coroutines.has_collection(name)
            for each in (manager, async_manager):
                assert line(each)["address"] == address
            topology.body = body_of(2, ("a", f"http://{address}", 1), ("b", milvus.uri, 3))
            old.refuse()
            old.reset()
            ours = asyncio.to_thread(client.has_collection, name, timeout=LIMIT)
            theirs = coroutines.has_collection(name, timeout=LIMIT)
            assert all(await asyncio.gather(ours, theirs))
            for each in (manager, async_manager):
                assert (line(each)["address"], line(each)["generation"]) == (milvus.address, 2)
            assert coroutines._handler.server_address == milvus.address
        assert {headers["Authorization"] for _, headers in topology.requests} == {
            "Bearer root:Milvus"
        }


# -- files and errors ------------------------------------------------------------


def test_file_path_opens_milvus_lite(manager: MilvusManager, tmp_path: Path) -> None:
    path = str(tmp_path / "vectors.db")
    with MilvusClient(path, manager=manager) as one, MilvusClient(path, manager=manager) as other:
        one.create_collection("here", dimension=4)
        assert other.has_collection("here")
        assert line(manager)["client_count"] == 2


async def test_file_path_opens_milvus_lite_for_asyncio(
    async_manager: AsyncMilvusManager, tmp_path: Path
) -> None:
    path = str(tmp_path / "vectors.db")
    async with AsyncMilvusClient(path, db_name="default", manager=async_manager) as client:
        assert await client.list_collections() == []


def test_file_in_a_missing_folder_is_an_error(manager: MilvusManager, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        MilvusClient(str(tmp_path / "nowhere" / "vectors.db"), manager=manager)


def test_unavailable_errors_of_milvus_are_recognized() -> None:
    moved = pymilvus.MilvusException(1, "code: STREAMING_CODE_REPLICATE_VIOLATION, not primary")
    assert milvus_unavailable(moved)
    assert not milvus_unavailable(pymilvus.MilvusException(1, "no such collection"))
    assert not milvus_unavailable(ValueError("something else"))


def test_moored_rpc_imports_without_pymilvus() -> None:
    code = "import sys, moored.rpc; sys.exit('pymilvus' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
