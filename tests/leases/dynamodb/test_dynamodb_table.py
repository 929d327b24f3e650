"""The DynamoDB table: created where that is allowed, and checked before its first use."""

from __future__ import annotations

import asyncio
import re

import pytest
from tests.leases.conformance import request
from tests.leases.dynamodb.conftest import Opener
from tests.leases.dynamodb.fault_injection import inject, refusal, times
from tests.leases.dynamodb.servers import DynamoServer, Ministack

from moored.kernel import Clock
from moored.leases import StoreMisconfigured, StoreUnavailable, connect
from moored.leases._dynamodb._setup_help import ACTIONS
from moored.leases.dynamodb import CounterStore, create_command, open_store

LAYOUTS = ["slots", "counter"]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_missing_table_is_created_only_on_a_local_server(
    server: DynamoServer, table: str, layout: str
) -> None:
    url = server.url(table, layout=layout)
    careful = open_store(f"{url}&create=false", clock=Clock.system())
    with pytest.raises(StoreMisconfigured) as caught:
        await careful.open()
    assert create_command(careful.link.config) in str(caught.value)
    maker = open_store(url, clock=Clock.system())
    await maker.open()
    await careful.open()  # now it is there
    assert await careful.acquire(request()) is not None
    await maker.close()
    await careful.close()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_clients_that_start_together_create_one_table(
    server: DynamoServer, table: str, layout: str
) -> None:
    stores = [open_store(server.url(table, layout=layout), clock=Clock.system()) for _ in range(5)]
    await asyncio.gather(*(store.open() for store in stores))
    grants = await asyncio.gather(*(store.acquire(request(limit=3)) for store in stores))
    assert sum(grant is not None for grant in grants) == 3
    for store in stores:
        await store.close()


async def test_a_table_of_another_layout_is_refused(open_table: Opener) -> None:
    await open_table(layout="slots")
    with pytest.raises(StoreMisconfigured, match=re.escape("['pk', 'slot'], and layout=counter")):
        await open_table(layout="counter")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_store_that_was_opened_in_an_outage_works_after_it(
    server: DynamoServer, table: str, layout: str
) -> None:
    store = open_store(server.url(table, layout=layout), clock=Clock.system())
    await inject(store, before=times(6, "describe_table", refusal("InternalServerError")))
    with pytest.raises(StoreUnavailable):
        await store.open()
    assert await store.acquire(request()) is not None
    await store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_deleted_table_is_created_again_on_a_local_server(
    open_table: Opener, layout: str
) -> None:
    """A local server that keeps its tables in memory was restarted."""
    store = await open_table(layout=layout)
    wanted = request()
    await store.acquire(wanted)
    await store.link.call("delete_table")
    assert list(await store.renew([wanted])) == [False]
    assert await store.acquire(request()) is not None


async def test_a_deleted_table_in_aws_raises_store_misconfigured(open_table: Opener) -> None:
    await open_table()
    store = await open_table(create="false")
    await store.link.call("delete_table")
    with pytest.raises(StoreMisconfigured, match="create the table"):
        await store.acquire(request())


async def test_a_table_that_is_being_created_is_awaited(open_table: Opener) -> None:
    store = await open_table()
    client = await inject(store)
    answers = iter(["CREATING", "CREATING", "ACTIVE"])
    describe = client._client.describe_table

    async def describe_table(**arguments: object) -> object:
        reply = await describe(**arguments)
        reply["Table"]["TableStatus"] = next(answers)
        return reply

    client._client.describe_table = describe_table
    store._table._ready = False
    await store.open()
    assert [operation for operation, _ in client.asked].count("describe_table") == 3


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_iam_policy_allows_exactly_the_requests_made(
    open_table: Opener, layout: str
) -> None:
    """All that the stores do, against the list in the docs and in the errors."""
    permissions = {
        "describe_table": {"DescribeTable"},
        "create_table": {"CreateTable"},
        "query": {"Query"},
        "scan": {"Scan"},
        "get_item": {"GetItem"},
        "update_item": {"UpdateItem"},
        "transact_write_items": {"PutItem", "UpdateItem", "DeleteItem"},
    }
    store = await open_table(layout=layout)
    wanted = [request(limit=3) for _ in range(2)]
    for each in (*wanted, wanted[1]):
        await store.acquire(each)
    await store.renew(wanted)
    await store.held("db")
    await store.held()
    await store.take("db", rate=1.0, burst=1, tokens=1)
    if isinstance(store, CounterStore):
        assert await store._sweeper._claim()
        await store._sweeper._correct("db")
    await store.release(wanted)
    asked = set().union(*(permissions[operation] for operation in store.link.requests))
    assert asked - {"CreateTable"} == set(ACTIONS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["acquire", "renew"])
async def test_a_lease_written_with_a_wrong_time_is_written_again(
    open_table: Opener, layout: str, how: str
) -> None:
    store = await open_table(own_time=True, layout=layout)
    wanted = request(ttl=60.0)
    first = await store.acquire(wanted)
    # The machine was suspended: the monotonic clock, and all that was known by it, is behind.
    store.link.time._low -= 900.0
    store.link.time._high -= 900.0
    if how == "acquire":
        assert await store.acquire(wanted) == first
    else:
        assert list(await store.renew([wanted])) == [True]
    assert store.link.time.corrections == 1
    other = await open_table(layout=layout)
    (held,) = await other.held("db")
    assert held.expires_in > 55.0


@pytest.mark.soak
async def test_a_proxy_is_not_used_for_a_local_server(
    ministack: Ministack, table: str, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    store = open_store(ministack.url(table), clock=Clock.system())
    await store.open()
    assert await store.acquire(request()) is not None
    await store.close()


async def test_a_client_is_created_from_a_url(ministack: Ministack, table: str) -> None:
    url = ministack.url(table)
    async with connect(url, service_name="orders", on_unavailable="refuse") as leases:
        async with leases.exclusive("nightly-report", ttl=30.0) as lease:
            assert lease.fence > 0
            assert [held.holder.service_name for held in await leases.held()] == ["orders"]
        assert list(await leases.held()) == []
        assert await leases.rate_limit("connects", rate=100.0).take() == 0.0
