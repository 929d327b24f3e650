"""DynamoDB for the tests, one server of each kind per worker, and an empty table per test."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import pytest
from aiobotocore.session import get_session  # type: ignore[import-untyped]
from tests.leases.dynamodb.servers import DynamoLocal, DynamoServer, Ministack, NotHere, date_of
from tests.leases.scale import thorough

from moored.kernel import Clock
from moored.leases import Holder, Request
from moored.leases._dynamodb import _link
from moored.leases._dynamodb._time import ServerTime
from moored.leases.dynamodb import CounterStore, DynamoConfig, SlotStore, open_store

_numbers = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def _one_session() -> Iterator[None]:
    """Share the driver's session, which takes most of the CPU time of opening a store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_link, "get_session", cache(get_session))
        yield


@pytest.fixture(scope="session")
def ministack() -> Iterator[DynamoServer]:
    """The emulator, for tests that do not harm it."""
    with Ministack() as server:
        yield server


@pytest.fixture(scope="session")
def dynamo_local() -> Iterator[DynamoServer]:
    """AWS's DynamoDB Local; without npm and a JDK its tests are skipped, everywhere."""
    try:
        server = DynamoLocal()
    except NotHere as why:
        pytest.skip(str(why))
    with server:
        # A Java machine takes a second for what it does the first time.
        for layout in ("slots", "counter"):
            asyncio.run(_warm_up(server.url(f"warm-{layout}", layout=layout)))
        yield server


async def _warm_up(url: str) -> None:
    store = open_store(url, clock=Clock.system())
    wanted = Request("warm", "up", 2, 60.0, Holder("", "", "", 0))
    await store.acquire(wanted)
    await store.renew([wanted])
    await store.take("warm", rate=1.0, burst=1, tokens=1)
    await store.held()
    await store.release([wanted])
    await store.close()


SERVERS = ["ministack", "dynamo_local"]

#: What runs in `make test` of the tests that need a server: fences, renewal, hand-over to the next
#: holder, tokens, and the schema that other programs share. All others run in `make soak`.
REPRESENTATIVES = {
    "test_the_fence_only_grows",
    "test_a_renewal_extends_a_lease",
    "test_an_expired_lease_is_not_taken_back_from_the_next_holder",
    "test_concurrent_takes_never_share_a_token",
    "test_the_connections_of_a_pool_are_counted_under_the_host_as_by_other_programs",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each server at full scale; at a smaller one the emulator, which starts sooner."""
    if "server" in metafunc.fixturenames:
        marks = [] if metafunc.function.__name__ in REPRESENTATIVES else [pytest.mark.soak]
        names = thorough(SERVERS[:1], SERVERS)
        metafunc.parametrize(
            "server", [pytest.param(name, marks=marks) for name in names], indirect=True
        )


@pytest.fixture
def server(request: pytest.FixtureRequest) -> DynamoServer:
    """A server of either kind."""
    server: DynamoServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session")
def clocks() -> dict[str, ServerTime]:
    """What is known of each server's time, by its endpoint: shared, so that it is known well."""
    return {}


@pytest.fixture
def table() -> str:
    """The name of a table that is not there yet."""
    return f"leases-{os.getpid()}-{next(_numbers)}"


Opener = Callable[..., Awaitable[SlotStore | CounterStore]]


@pytest.fixture
async def open_table(
    server: DynamoServer, table: str, clocks: dict[str, ServerTime]
) -> AsyncIterator[Opener]:
    """Opens stores onto one table; with parameters of the URL."""
    # The driver takes hundreds of steps for a request; debugging each would be most of it.
    asyncio.get_running_loop().set_debug(False)
    async with AsyncExitStack() as stores:

        async def open_one(
            *, clock: Clock | None = None, own_time: bool = False, **parameters: Any
        ) -> SlotStore | CounterStore:
            config = DynamoConfig.from_url(server.url(table, **{"skew": 0, **parameters}))
            kind = SlotStore if config.layout == "slots" else CounterStore
            time = None if own_time else well_known(server, clocks)
            store = kind(config, clock=clock or Clock.system(), time=time)
            stores.push_async_callback(store.close)
            await store.open()
            return store

        yield open_one


def well_known(server: DynamoServer, clocks: dict[str, ServerTime]) -> ServerTime:
    """The server's time, known to some hundredths of a second."""
    if server.endpoint not in clocks:
        clocks[server.endpoint] = known = ServerTime(Clock.system())
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            sent = time.monotonic()
            known.observe(date_of(server), sent=sent, received=time.monotonic())
            time.sleep(0.01)
    return clocks[server.endpoint]
