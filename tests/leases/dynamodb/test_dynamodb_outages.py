"""DynamoDB is killed, stalled and black-holed: no call hangs, and limits hold again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.leases.dynamodb.servers import DynamoLocal, DynamoServer, Ministack, NotHere
from tests.leases.fleet import KEY, Fleet, storm
from tests.leases.observer import Event, beliefs, counts, overfull
from tests.leases.scale import thorough

from moored.leases import Lease, Leases, StoreUnavailable, connect
from moored.testing import base_seed, scaled
from moored.testing.proxy import FaultProxy

pytestmark = pytest.mark.soak

#: Seconds that one call of the store may take here.
TIMEOUT = 2.0
#: Three times what anything may take that waits for one call.
PROMPT = 3 * TIMEOUT
#: A Java machine that starts again, and a client that looks every few seconds.
RECOVERY = 60.0

FAULTS = thorough(["black_holed"], ["killed", "stopped", "stalled", "black_holed"])
LAYOUTS = ["slots", "counter"]


class Place:
    """A server that a test may harm, behind a proxy."""

    def __init__(self, server: DynamoServer, proxy: FaultProxy, table: str) -> None:
        self._server = server
        self._proxy = proxy
        self._table = table

    def url(self, **parameters: str | float) -> str:
        direct = self._server.url(self._table, timeout=TIMEOUT, **parameters)
        return direct.replace(f":{self._server.port}", f":{self._proxy.port}")

    def harm(self, fault: str) -> None:
        match fault:
            case "killed":
                self._server.halt()
            case "stopped":
                os.kill(self._server.pid, signal.SIGSTOP)
            case "stalled":
                self._proxy.stall()
            case "black_holed":
                self._proxy.black_hole()

    def heal(self, fault: str) -> None:
        if fault == "killed":
            self._server.start()
        if fault == "stopped":
            os.kill(self._server.pid, signal.SIGCONT)
        self._proxy.heal()


@pytest.fixture(scope="module")
def mortal_ministack() -> Iterator[DynamoServer]:
    with Ministack() as server:
        yield server


@pytest.fixture(scope="module")
def mortal_dynamo_local() -> Iterator[DynamoServer]:
    try:
        server = DynamoLocal(durable=True)
    except NotHere as why:
        pytest.skip(str(why))
    with server:
        yield server


@contextmanager
def placed(server: DynamoServer, table: str) -> Iterator[Place]:
    with FaultProxy("127.0.0.1", server.port).in_thread() as proxy:
        yield Place(server, proxy, table)


@pytest.fixture
def place(mortal_ministack: DynamoServer, table: str) -> Iterator[Place]:
    with placed(mortal_ministack, table) as place:
        yield place


@pytest.fixture
def durable_place(mortal_dynamo_local: DynamoServer, table: str) -> Iterator[Place]:
    with placed(mortal_dynamo_local, table) as place:
        yield place


# -- many processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "layout"), list(itertools.product(FAULTS, LAYOUTS)))
def test_the_limit_holds_for_a_fleet_through_an_outage(
    place: Place, fault: str, layout: str, tmp_path: Path
) -> None:
    through_an_outage(place, fault, layout, tmp_path)


@pytest.mark.parametrize("layout", thorough(["slots"], LAYOUTS))
def test_a_fleet_survives_a_sigkill_of_its_server(
    durable_place: Place, layout: str, tmp_path: Path
) -> None:
    through_an_outage(durable_place, "killed", layout, tmp_path)


def through_an_outage(place: Place, fault: str, layout: str, tmp_path: Path) -> None:
    """A storm before, an outage that is longer than a lease lives, and a storm after."""
    seconds = scaled(15, least=1)
    url = place.url(layout=layout, sweep_every=0.5)
    with Fleet(url, tmp_path / "log", ttl=4.0, timeout=TIMEOUT) as fleet:
        storm(fleet, workers=6, limit=3, seconds=seconds, seed=base_seed())
        fleet.wait_for("acquired")
        place.harm(fault)
        fleet.wait_for("unavailable")
        time.sleep(4.5)
        place.heal(fault)
        back = time.monotonic_ns()
        with within(RECOVERY, "all of them are answered again"):
            while not _answered(fleet.events(), back) >= set(fleet.pids):
                assert time.monotonic_ns() < back + RECOVERY * 1e9, fleet.events()[-20:]
                time.sleep(0.02)
        time.sleep(seconds)
        fleet.kill_all()
        seen = fleet.events()
        assert overfull(beliefs(seen), 3) is None
        assert counts(seen)["crashed"] == 0, seen
        assert fleet.refill(3) < 3 * fleet.ttl + 5.0


def _answered(seen: list[Event], since: int) -> set[int]:
    """The processes whose store has given or refused them something since then."""
    return {e["pid"] for e in seen if e["at"] > since and e["what"] in ("acquired", "refused")}


# -- one client ----------------------------------------------------------------------------------


@contextmanager
def within(limit: float, what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < limit, f"{what}: took {took:.1f} s"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(RECOVERY):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def got(leases: Leases, *, limit: int = 3, ttl: float = 60.0) -> Lease:
    lease = await leases.acquire(KEY, limit=limit, ttl=ttl)
    assert lease is not None
    return lease


@pytest.mark.parametrize("fault", FAULTS)
async def test_local_leases_are_granted_while_the_store_is_down(place: Place, fault: str) -> None:
    async with connect(
        place.url(), on_unavailable="local", local_limit=2, timeout=TIMEOUT
    ) as leases:
        real = await got(leases)
        await asyncio.to_thread(place.harm, fault)
        with within(PROMPT, "a local lease"):
            local = await got(leases)
        assert local.local
        with within(PROMPT, "an exclusive lease"), pytest.raises(StoreUnavailable):
            await leases.exclusive("report", ttl=60.0).acquire()
        await asyncio.to_thread(place.heal, fault)
        await until(lambda: not local.local)
        assert {held.id for held in await leases.held(KEY)} == {real.id, local.id}
        assert await leases.acquire(KEY, limit=2) is None


@pytest.mark.parametrize(("fault", "layout"), list(itertools.product(FAULTS, LAYOUTS)))
async def test_acquire_is_refused_while_the_store_is_down(
    place: Place, fault: str, layout: str
) -> None:
    url = place.url(layout=layout)
    async with connect(url, on_unavailable="refuse", timeout=TIMEOUT) as leases:
        brief, long = await got(leases, ttl=4.0), await got(leases)
        await asyncio.to_thread(place.harm, fault)
        for _ in range(3):
            with within(PROMPT, "a refusal"), pytest.raises(StoreUnavailable):
                await leases.acquire(KEY, limit=3)
        with within(PROMPT, "a rate limit"), pytest.raises(StoreUnavailable):
            await leases.rate_limit("connects").take()
        async with asyncio.timeout(3 * 4.0):
            error = await brief.lost()
        assert error is not None
        assert error.reason == "expired"
        assert long.live
        with within(PROMPT, "a release"):
            await long.release()
        await asyncio.to_thread(place.heal, fault)
        lease = await _recovered(leases)
        # The lease that was released in the outage is free now, too.
        await until(lambda: leases.statistics().in_doubt == 0)
        assert [held.id for held in await leases.held(KEY)] == [lease.id]


async def _recovered(leases: Leases) -> Lease:
    async with asyncio.timeout(RECOVERY):
        while True:
            try:
                return await got(leases)
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def test_a_client_opens_while_the_store_is_down(place: Place) -> None:
    place.harm("black_holed")
    url = place.url()
    with within(3 * PROMPT, "the start"), pytest.raises(StoreUnavailable):
        await connect(url, on_unavailable="refuse", timeout=TIMEOUT).open()
    async with connect(url, on_unavailable="local", timeout=TIMEOUT) as leases:
        lease = await got(leases)
        assert lease.local
        place.heal("black_holed")
        await until(lambda: not lease.local)
        assert lease.live
