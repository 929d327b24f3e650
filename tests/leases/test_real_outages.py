"""Real stores are killed, stalled and black-holed: no call hangs, and limits hold again."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.leases.fleet import KEY, Fleet, storm
from tests.leases.observer import Event, beliefs, counts, overfull
from tests.leases.redis_server import RedisServer
from tests.leases.scale import thorough
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres
from moored.leases import Lease, LeaseLost, Leases, StoreUnavailable, connect
from moored.testing import base_seed, scaled
from moored.testing.proxy import FaultProxy

#: Seconds that one call of a store may take here.
TIMEOUT = 1.0
#: What anything may take on a busy machine that waits for one call.
LIMIT = 10 * TIMEOUT
#: How long a client may take to find out that its store is back: it asks every 5 s at last.
RECOVERY = 30.0

FAULTS = ["killed", "refused", "stalled", "black_holed"]
#: Each store, and each fault on either.
CASES = thorough(
    [("redis", "killed"), ("postgres", "black_holed")],
    list(itertools.product(["redis", "postgres"], FAULTS)),
)


@dataclass
class Place:
    """A store that a test may harm, behind a proxy."""

    server: RedisServer | SyncEmbeddedPostgres
    proxy: FaultProxy
    direct_url: str

    @property
    def url(self) -> str:
        return self.direct_url.replace(f":{self.server.port}/", f":{self.proxy.port}/")

    def harm(self, fault: str) -> None:
        match fault:
            case "killed":
                self.server.kill()
            case "refused":
                self.proxy.refuse()
                self.proxy.reset()
            case "stalled":
                self.proxy.stall()
            case "black_holed":
                self.proxy.black_hole()

    def heal(self, fault: str) -> None:
        if fault == "killed":
            self.server.start()
        self.proxy.heal()


@pytest.fixture(scope="module")
def redis_place() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def postgres_place(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    if ("postgres", "killed") not in CASES:
        yield request.getfixturevalue("postgres")
        return
    with SyncEmbeddedPostgres() as server:
        yield server


@pytest.fixture(params=["redis", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    server = request.getfixturevalue(f"{request.param}_place")
    option = "prefix" if request.param == "redis" else "schema"
    with FaultProxy("127.0.0.1", server.port).in_thread() as proxy:
        yield Place(server, proxy, f"{server.url}?{option}={tmp_path.name}")


# -- many processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "fault"), thorough(CASES[:1], CASES), indirect=["place"])
def test_the_limit_holds_for_a_fleet_through_an_outage(
    place: Place, fault: str, tmp_path: Path
) -> None:
    seconds = scaled(15, least=1)
    with Fleet(place.url, tmp_path / "log", ttl=1.0, timeout=TIMEOUT) as fleet:
        storm(fleet, workers=8, limit=4, seconds=seconds, seed=base_seed())
        place.harm(fault)
        # Longer than the ttl: every holder must have lost its lease.
        time.sleep(1.5)
        fleet.wait_for("unavailable")
        place.heal(fault)
        back = time.monotonic_ns()
        with within(RECOVERY, "all of them are answered again"):
            while not _answered(fleet.events(), back) >= set(fleet.pids):
                time.sleep(0.02)
        time.sleep(seconds)
        fleet.kill_all()
        seen = fleet.events()
        assert overfull(beliefs(seen), 4) is None
        assert counts(seen)["crashed"] == 0, seen
        assert fleet.refill(4) < fleet.ttl + LIMIT


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


async def until(condition: Callable[[], bool], limit: float = RECOVERY) -> None:
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def _quickest(call: Callable[[], Awaitable[Lease | None]]) -> float:
    """Make a call that is refused a few times, and return how long it took the quickest time."""
    took = []
    for _ in range(5):
        begin = time.monotonic()
        assert await call() is None
        took.append(time.monotonic() - begin)
    return min(took)


async def got(leases: Leases, *, limit: int = 3, ttl: float = 60.0) -> Lease:
    lease = await leases.acquire(KEY, limit=limit, ttl=ttl)
    assert lease is not None
    return lease


@pytest.mark.every_loop
@pytest.mark.parametrize(("place", "fault"), CASES, indirect=["place"])
async def test_local_leases_are_granted_while_the_store_is_down(place: Place, fault: str) -> None:
    async with (
        connect(place.url, on_unavailable="local", local_limit=2, timeout=TIMEOUT) as leases,
    ):
        real = await got(leases)
        await until(lambda: not real.local)
        await asyncio.to_thread(place.harm, fault)
        with within(LIMIT, "a local lease"):
            local = await got(leases)
        assert local.local
        assert local.live
        # The outage is known: no call waits for the store.
        assert await _quickest(lambda: leases.acquire(KEY, limit=3)) < TIMEOUT / 2
        assert leases.statistics().local == 1
        assert await leases.rate_limit("connects", rate=10.0).take() == 0.0
        # An exclusive lease of one process alone would be no such thing.
        with within(LIMIT, "an exclusive lease"), pytest.raises(StoreUnavailable):
            await leases.exclusive("report", ttl=60.0).acquire()

        await asyncio.to_thread(place.heal, fault)
        await until(lambda: not local.local)
        assert local.live
        assert local.fence > 0
        async with connect(place.direct_url) as other:
            assert {held.id for held in await other.held(KEY)} == {real.id, local.id}
            assert await other.acquire(KEY, limit=2) is None


@pytest.mark.every_loop
@pytest.mark.parametrize("fault", ["refused", "black_holed"])
async def test_local_leases_beyond_the_limit_are_lost_after_the_outage(
    place: Place, fault: str
) -> None:
    async with connect(place.url, on_unavailable="local", timeout=TIMEOUT) as leases:
        place.harm(fault)
        local = await got(leases, limit=2)
        async with connect(place.direct_url) as other:
            for _ in range(2):
                await got(other, limit=2)
            place.heal(fault)
            async with asyncio.timeout(RECOVERY):
                error = await local.lost()
            assert isinstance(error, LeaseLost)
            assert error.reason == "refused"
            assert not local.live


@pytest.mark.parametrize(("place", "fault"), CASES, indirect=["place"])
async def test_acquire_is_refused_while_the_store_is_down(place: Place, fault: str) -> None:
    async with connect(place.url, on_unavailable="refuse", timeout=TIMEOUT) as leases:
        brief, long = await got(leases, ttl=1.0), await got(leases)
        await asyncio.to_thread(place.harm, fault)
        for _ in range(3):
            with within(LIMIT, "a refusal"), pytest.raises(StoreUnavailable):
                await leases.acquire(KEY, limit=3)
        with within(LIMIT, "a rate limit"), pytest.raises(StoreUnavailable):
            await leases.rate_limit("connects").take()
        async with asyncio.timeout(LIMIT):
            error = await brief.lost()
        assert isinstance(error, LeaseLost)
        assert error.reason == "expired"
        assert long.live
        with within(LIMIT, "a release"):
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
                # None is possible at first: requests of the outage arrive now, and are undone soon.
                if (lease := await leases.acquire(KEY, limit=3, ttl=60.0)) is not None:
                    return lease
            except StoreUnavailable:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.every_loop
@pytest.mark.parametrize("mode", ["local", "refuse"])
async def test_a_client_opens_while_the_store_is_down(place: Place, mode: str) -> None:
    place.harm("refused")
    if mode == "refuse":
        with within(LIMIT, "the start"), pytest.raises(StoreUnavailable):
            await connect(place.url, on_unavailable="refuse", timeout=TIMEOUT).open()
        return
    async with connect(place.url, on_unavailable="local", timeout=TIMEOUT) as leases:
        lease = await got(leases)
        assert lease.local
        place.heal("refused")
        await until(lambda: not lease.local)
        assert lease.live
