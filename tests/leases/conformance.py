"""What every store must do, in tests that do not know which one it is.

A store's test module makes a subclass, with a fixture that opens stores onto one empty place::

    class TestRedis(StoreConformance):
        @pytest.fixture
        async def open_store(self, redis_url) -> AsyncIterator[OpenStore]:
            async with opening(lambda: redis.open_store(redis_url, clock=Clock.system())) as opener:
                yield opener

Each call of `open_store()` is another client of the same place. `ttl` is as short as the store can
be trusted to answer within; only tests about expiry wait, and only for about that long.

Two things about the protocol that are easy to overlook, and tested here: `renew` and `release` go
by the key and the id alone (an operator who ends a lease knows no limit and no ttl), and a lease
that has ended is never revived by a late renewal, whether or not there is room.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from moored.leases import Grant, Holder, Request, Store, Taken

__all__ = [
    "LeaseConformance",
    "OpenStore",
    "RateConformance",
    "StoreConformance",
    "StoreTests",
    "opening",
    "request",
]

OpenStore = Callable[[], Awaitable[Store]]

HOLDER = Holder(service_name="orders", owner="pool-1", host="host-1", pid=4711)
LONG = 60.0

ODD_KEYS = [
    "a",
    "A",
    "a ",
    " a",
    "a:b",
    "a/b#c?d=e&f",
    "a*",
    "a%",
    "a_",
    "a{b}c",
    "a\\",
    "a'b\"c;--",
    "tab\tnew\nline",
    "Schlüssel",
    "鍵",
    "🔑🔒",
    "é",  # composed, and
    "e\u0301",  # decomposed: two different keys
    "k" * 1000,
]

_ids = itertools.count(1)


def request(key: str = "db", *, limit: int = 1, ttl: float = LONG, known: str = "") -> Request:
    """A request with an id of its own, or with a known one."""
    return Request(key, known or f"id-{next(_ids)}", limit, ttl, HOLDER)


@asynccontextmanager
async def opening(make: Callable[[], Store]) -> AsyncIterator[OpenStore]:
    """Opens as many stores as are asked for, and closes them all."""
    opened: list[Store] = []

    async def open_store() -> Store:
        store = make()
        await store.open()
        opened.append(store)
        return store

    try:
        yield open_store
    finally:
        for store in opened:
            await store.close()


class StoreTests:
    """What the tests share; a subclass gives `open_store`, and may change the numbers."""

    #: Seconds that a short lease lives: several times the slowest answer of the store.
    ttl = 0.5
    #: How many leases make a large batch.
    many = 250
    #: Real seconds for which a rate limit is kept busy.
    busy = 0.6
    #: By how many seconds the store's wall clock may differ from this machine's.
    wall_error = 5.0

    @pytest.fixture
    def open_store(self) -> OpenStore:
        raise NotImplementedError("a subclass gives this fixture")

    @pytest.fixture
    async def store(self, open_store: OpenStore) -> Store:
        return await open_store()

    async def pass_time(self, seconds: float) -> None:
        """Let the store's clock move on."""
        await asyncio.sleep(seconds)

    async def expire(self) -> None:
        """Wait until a lease with `ttl` has expired."""
        await self.pass_time(self.ttl * 1.2)


class LeaseConformance(StoreTests):
    """The tests of leases."""

    #: How often each of eight workers tries to acquire a lease.
    turns = 15

    # -- acquire -------------------------------------------------------------------------------

    async def test_grants_exactly_the_limit(self, store: Store) -> None:
        for _ in range(3):
            wanted = request(limit=3)
            grant = await store.acquire(wanted)
            assert isinstance(grant, Grant)
            assert grant.id == wanted.id
        assert await store.acquire(request(limit=3)) is None
        assert len(await store.held("db")) == 3

    async def test_grants_exactly_the_limit_to_concurrent_acquires(
        self, open_store: OpenStore
    ) -> None:
        stores = [await open_store() for _ in range(4)]
        grants = await asyncio.gather(
            *(stores[n % 4].acquire(request(limit=10)) for n in range(20))
        )
        assert sum(grant is not None for grant in grants) == 10
        assert len(await stores[0].held("db")) == 10

    async def test_the_limit_holds_while_leases_come_and_go(self, open_store: OpenStore) -> None:
        stores = [await open_store() for _ in range(4)]
        held = peak = granted = 0

        async def worker(store: Store) -> None:
            nonlocal held, peak, granted
            for _ in range(self.turns):
                wanted = request(limit=3)
                if await store.acquire(wanted) is None:
                    await asyncio.sleep(0)
                    continue
                held, granted = held + 1, granted + 1
                peak = max(peak, held)
                await asyncio.sleep(0)
                held -= 1
                assert list(await store.release([wanted])) == [True]

        await asyncio.gather(*(worker(stores[n % 4]) for n in range(8)))
        assert 1 <= peak <= 3
        assert granted >= self.turns
        assert list(await stores[0].held()) == []

    async def test_the_same_id_gets_the_same_lease(self, store: Store) -> None:
        wanted = request(limit=2)
        first = await store.acquire(wanted)
        assert first is not None
        assert await store.acquire(wanted) == first
        assert len(await store.held("db")) == 1
        assert await store.acquire(request(limit=2)) is not None
        assert await store.acquire(wanted) == first
        assert await store.acquire(request(limit=2)) is None

    async def test_concurrent_acquires_of_the_same_id_get_one_lease(
        self, open_store: OpenStore
    ) -> None:
        stores = [await open_store() for _ in range(4)]
        wanted = request(limit=5)
        grants = await asyncio.gather(*(store.acquire(wanted) for store in stores))
        assert len(set(grants)) == 1
        assert None not in grants
        assert len(await stores[0].held("db")) == 1

    async def test_keys_have_limits_of_their_own(self, store: Store) -> None:
        assert await store.acquire(request("db/orders")) is not None
        assert await store.acquire(request("db/users")) is not None
        assert await store.acquire(request("db/orders")) is None

    async def test_a_lowered_limit_ends_no_lease_and_grants_none(self, store: Store) -> None:
        for _ in range(3):
            await store.acquire(request(limit=3))
        assert await store.acquire(request(limit=2)) is None
        assert len(await store.held("db")) == 3
        assert await store.acquire(request(limit=4)) is not None

    async def test_leases_outlive_the_store_object_that_acquired_them(
        self, open_store: OpenStore
    ) -> None:
        first = await open_store()
        wanted = request()
        await first.acquire(wanted)
        await first.close()
        second = await open_store()
        assert await second.acquire(request()) is None
        assert list(await second.release([wanted])) == [True]

    # -- release -------------------------------------------------------------------------------

    async def test_a_release_makes_room(self, store: Store) -> None:
        wanted = request()
        await store.acquire(wanted)
        assert list(await store.release([wanted])) == [True]
        assert await store.acquire(request()) is not None

    async def test_a_second_release_returns_false(self, store: Store) -> None:
        wanted = request(limit=2)
        other = request(limit=2)
        await store.acquire(wanted)
        await store.acquire(other)
        assert list(await store.release([wanted])) == [True]
        assert list(await store.release([wanted])) == [False]
        assert [held.id for held in await store.held("db")] == [other.id]

    async def test_the_same_lease_twice_in_one_release_ends_once(self, store: Store) -> None:
        wanted, other = request(limit=2), request(limit=2)
        await store.acquire(wanted)
        await store.acquire(other)
        assert sorted(await store.release([wanted, wanted])) == [False, True]
        assert len(await store.held("db")) == 1

    async def test_concurrent_releases_end_a_lease_once(self, open_store: OpenStore) -> None:
        stores = [await open_store() for _ in range(4)]
        wanted = request(limit=4)
        for each in (wanted, *(request(limit=4) for _ in range(3))):
            await stores[0].acquire(each)
        answers = await asyncio.gather(*(store.release([wanted]) for store in stores))
        assert sorted(ended for (ended,) in answers) == [False, False, False, True]
        # A counter would have gone down four times, and would now give too many.
        assert await stores[0].acquire(request(limit=4)) is not None
        assert await stores[0].acquire(request(limit=4)) is None

    async def test_releasing_an_unknown_id_has_no_effect(self, store: Store) -> None:
        assert list(await store.release([request()])) == [False]
        assert await store.acquire(request()) is not None

    async def test_an_id_of_another_key_is_not_released(self, store: Store) -> None:
        mine = request("db/orders")
        await store.acquire(mine)
        foreign = replace(mine, key="db/users")
        assert list(await store.release([foreign])) == [False]
        assert list(await store.renew([foreign])) == [False]
        assert [held.id for held in await store.held("db/orders")] == [mine.id]

    async def test_a_batch_of_releases_is_answered_in_order(self, store: Store) -> None:
        live = [request("db/a", limit=9), request("db/b", limit=9), request("db/a", limit=9)]
        for wanted in live:
            await store.acquire(wanted)
        unknown = request("db/a", limit=9)
        batch = [live[0], unknown, live[1], live[2], replace(unknown, key="db/c")]
        assert list(await store.release(batch)) == [True, False, True, True, False]
        assert list(await store.held()) == []

    async def test_the_key_and_the_id_suffice_to_renew_and_release(self, store: Store) -> None:
        for _ in range(20):
            await store.acquire(request(limit=20))
        chosen = (await store.held("db"))[7]
        bare = Request("db", chosen.id, 1, 1.0, Holder("", "", "", 0))
        assert list(await store.release([bare])) == [True]
        assert chosen.id not in {held.id for held in await store.held("db")}
        assert len(await store.held("db")) == 19

    async def test_empty_batches_return_empty_lists(self, store: Store) -> None:
        assert list(await store.release([])) == []
        assert list(await store.renew([])) == []
        assert list(await store.held()) == []

    # -- renew and expiry ----------------------------------------------------------------------

    async def test_a_lease_that_is_not_renewed_ends(self, store: Store) -> None:
        lost = request(ttl=self.ttl)
        assert await store.acquire(lost) is not None
        await self.expire()
        assert list(await store.held("db")) == []
        assert await store.acquire(request()) is not None
        assert list(await store.release([lost])) == [False]
        assert len(await store.held("db")) == 1

    async def test_a_renewal_extends_a_lease(self, store: Store) -> None:
        # Longer than a busy machine stops everything.
        wanted = request(ttl=3.0)
        await store.acquire(wanted)
        assert list(await store.renew([replace(wanted, ttl=LONG)])) == [True]
        await self.pass_time(wanted.ttl * 1.2)
        assert await store.acquire(request()) is None
        assert list(await store.renew([replace(wanted, ttl=self.ttl)])) == [True]
        await self.expire()
        assert list(await store.renew([wanted])) == [False]

    async def test_a_renewal_counts_from_now_with_its_own_ttl(self, store: Store) -> None:
        wanted = request(ttl=LONG)
        await store.acquire(wanted)
        assert list(await store.renew([replace(wanted, ttl=self.ttl)])) == [True]
        await self.expire()
        assert await store.acquire(request()) is not None

    async def test_an_expired_lease_is_not_revived(self, store: Store) -> None:
        late = request(limit=5, ttl=self.ttl)
        await store.acquire(late)
        await self.expire()
        # It is refused although the limit has room: its holder was notified of the loss.
        assert list(await store.renew([late])) == [False]
        assert list(await store.held("db")) == []

    async def test_an_expired_lease_is_not_taken_back_from_the_next_holder(
        self, store: Store
    ) -> None:
        old, new = request(ttl=self.ttl), request()
        await store.acquire(old)
        await self.expire()
        assert await store.acquire(new) is not None
        assert list(await store.renew([old])) == [False]
        assert list(await store.release([old])) == [False]
        assert await store.acquire(old) is None
        assert [held.id for held in await store.held("db")] == [new.id]

    async def test_a_released_lease_is_not_renewed(self, store: Store) -> None:
        wanted = request(limit=2)
        await store.acquire(wanted)
        await store.release([wanted])
        assert list(await store.renew([wanted])) == [False]
        assert list(await store.held("db")) == []

    async def test_an_unknown_id_is_not_renewed(self, store: Store) -> None:
        assert list(await store.renew([request(limit=2)])) == [False]
        assert list(await store.held("db")) == []

    async def test_a_batch_of_renewals_is_answered_in_order(self, store: Store) -> None:
        live = [request("db/a", limit=9), request("db/b", limit=9), request("db/a", limit=9)]
        for wanted in live:
            await store.acquire(wanted)
        unknown = request("db/a", limit=9)
        batch = [unknown, live[0], live[1], replace(unknown, key="db/c"), live[2]]
        assert list(await store.renew(batch)) == [False, True, True, False, True]
        assert len(await store.held()) == 3

    async def test_expired_and_live_leases_in_one_key(self, store: Store) -> None:
        short = [request(limit=6, ttl=self.ttl) for _ in range(3)]
        long = [request(limit=6) for _ in range(3)]
        for wanted in (*short, *long):
            assert await store.acquire(wanted) is not None
        await self.expire()
        assert {held.id for held in await store.held("db")} == {wanted.id for wanted in long}
        assert list(await store.renew([*short, *long])) == [False] * 3 + [True] * 3
        grants = [await store.acquire(request(limit=6)) for _ in range(4)]
        assert [grant is not None for grant in grants] == [True, True, True, False]

    async def test_large_batches(self, store: Store) -> None:
        wanted = [request(f"db/{n % 3}", limit=self.many) for n in range(self.many)]
        for start in range(0, self.many, 25):
            grants = await asyncio.gather(*map(store.acquire, wanted[start : start + 25]))
            assert None not in grants
        assert len(await store.held()) == self.many
        assert list(await store.renew(wanted)) == [True] * self.many
        assert list(await store.release(wanted)) == [True] * self.many
        assert list(await store.held()) == []

    # -- fences --------------------------------------------------------------------------------

    async def test_the_fence_only_grows(self, open_store: OpenStore) -> None:
        stores = [await open_store() for _ in range(2)]
        fences = []
        for turn in range(6):
            wanted = request(ttl=self.ttl)
            grant = await stores[turn % 2].acquire(wanted)
            assert grant is not None
            fences.append(grant.fence)
            # It ends in both ways: released, and expired.
            if turn % 3 == 2:
                await self.expire()
            else:
                await stores[turn % 2].release([wanted])
        assert fences == sorted(set(fences))
        assert fences[0] >= 1

    async def test_the_fence_grows_after_all_leases_of_the_key_ended(self, store: Store) -> None:
        first = await store.acquire(request(ttl=self.ttl))
        await self.expire()
        # Looking is when a store may tidy up: what it tidies away must not hold the fence.
        assert list(await store.held()) == []
        second = await store.acquire(request())
        assert first is not None
        assert second is not None
        assert second.fence > first.fence

    async def test_a_renewal_keeps_the_fence(self, store: Store) -> None:
        wanted = request()
        grant = await store.acquire(wanted)
        await store.renew([wanted])
        assert grant is not None
        assert [held.fence for held in await store.held("db")] == [grant.fence]

    # -- held ----------------------------------------------------------------------------------

    async def test_held_returns_all_fields(self, store: Store) -> None:
        wanted = replace(request("db/orders"), holder=Holder("büro", "pool 🔑", "höst", 65535))
        before = time.time()
        grant = await store.acquire(wanted)
        assert grant is not None
        (held,) = await store.held("db/orders")
        assert (held.key, held.id, held.fence) == ("db/orders", wanted.id, grant.fence)
        assert held.holder == wanted.holder
        assert before - self.wall_error <= held.created_at <= time.time() + self.wall_error
        assert 0 < held.expires_in <= LONG + 0.01
        assert held.expires_in > LONG / 2

    async def test_held_leases_of_one_key_or_of_all(self, store: Store) -> None:
        for key in ("db/orders", "db/users", "db"):
            await store.acquire(request(key, limit=2))
        await store.acquire(request("db", limit=2))
        assert [held.key for held in await store.held("db/users")] == ["db/users"]
        assert sorted(held.key for held in await store.held("db")) == ["db", "db"]
        everything = sorted(held.key for held in await store.held())
        assert everything == ["db", "db", "db/orders", "db/users"]
        assert list(await store.held("nobody")) == []

    async def test_unusual_keys_are_distinct(self, store: Store) -> None:
        for key in ODD_KEYS:
            assert await store.acquire(request(key)) is not None, key
        assert {held.key for held in await store.held()} == set(ODD_KEYS)
        for key in ODD_KEYS:
            assert await store.acquire(request(key)) is None, key
            (held,) = await store.held(key)
            assert list(await store.renew([request(key, known=held.id)])) == [True], key
            assert list(await store.release([request(key, known=held.id)])) == [True], key


class RateConformance(StoreTests):
    """The tests of rate limits."""

    async def test_a_burst_and_then_a_wait(self, store: Store) -> None:
        for _ in range(5):
            taken = await store.take("connects", rate=0.1, burst=5, tokens=1)
            assert taken.granted == 1
        granted, wait = await store.take("connects", rate=0.1, burst=5, tokens=1)
        assert granted == 0
        assert 0 < wait <= 10.01

    async def test_the_wait_is_long_enough(self, store: Store) -> None:
        rate = 4 / self.ttl
        assert (await store.take("connects", rate=rate, burst=2, tokens=2)).granted == 2
        granted, wait = await store.take("connects", rate=rate, burst=2, tokens=1)
        if granted == 0:
            await self.pass_time(wait + 0.01)
            granted, _ = await store.take("connects", rate=rate, burst=2, tokens=1)
        assert granted == 1

    async def test_a_take_grants_up_to_the_requested_tokens(self, store: Store) -> None:
        taken = await store.take("connects", rate=0.1, burst=5, tokens=3)
        assert taken == Taken(3, 0.0)
        taken = await store.take("connects", rate=0.1, burst=5, tokens=8)
        assert taken.granted == 2
        assert 0 < taken.wait <= 10.01
        assert (await store.take("connects", rate=0.1, burst=5, tokens=8)).granted == 0

    async def test_concurrent_takes_never_share_a_token(self, open_store: OpenStore) -> None:
        stores = [await open_store() for _ in range(4)]
        taken = await asyncio.gather(
            *(
                stores[n % 4].take("connects", rate=0.01, burst=10, tokens=1 + n % 2)
                for n in range(24)
            )
        )
        assert sum(each.granted for each in taken) == 10

    async def test_a_refused_take_costs_nothing(self, store: Store) -> None:
        rate = 2 / self.ttl
        await store.take("connects", rate=rate, burst=1, tokens=1)
        for _ in range(20):
            await store.take("connects", rate=rate, burst=1, tokens=1)
        await self.pass_time(self.ttl)
        assert (await store.take("connects", rate=rate, burst=1, tokens=1)).granted == 1

    async def test_an_idle_limit_saves_no_more_than_the_burst(self, store: Store) -> None:
        rate = 100 / self.ttl
        await store.take("connects", rate=rate, burst=3, tokens=3)
        await self.expire()
        assert (await store.take("connects", rate=rate, burst=3, tokens=50)).granted == 3

    async def test_a_rate_limit_and_a_lease_may_have_the_same_key(self, store: Store) -> None:
        assert (await store.take("db", rate=0.1, burst=1, tokens=1)).granted == 1
        assert await store.acquire(request("db")) is not None
        assert (await store.take("db2", rate=0.1, burst=1, tokens=1)).granted == 1
        assert (await store.take("db", rate=0.1, burst=1, tokens=1)).granted == 0
        assert [held.key for held in await store.held()] == ["db"]

    async def test_unusual_keys_have_separate_rate_limits(self, store: Store) -> None:
        for key in ODD_KEYS:
            assert (await store.take(key, rate=0.01, burst=1, tokens=1)).granted == 1, key
        for key in ODD_KEYS:
            assert (await store.take(key, rate=0.01, burst=1, tokens=1)).granted == 0, key

    async def test_no_window_exceeds_the_rate_limit(self, open_store: OpenStore) -> None:
        stores = [await open_store() for _ in range(4)]
        rate, burst = 40.0, 4
        seen: list[tuple[float, float, int]] = []
        end = time.monotonic() + self.busy

        async def taker(store: Store, tokens: int) -> None:
            while (sent := time.monotonic()) < end:
                taken = await store.take("connects", rate=rate, burst=burst, tokens=tokens)
                if taken.granted:
                    seen.append((sent, time.monotonic(), taken.granted))
                else:
                    await asyncio.sleep(min(taken.wait, 0.02))

        await asyncio.gather(*(taker(stores[n % 4], 1 + n % 3) for n in range(6)))
        assert sum(granted for _, _, granted in seen) >= burst
        assert windows_over(seen, rate=rate, burst=burst) == []


class StoreConformance(LeaseConformance, RateConformance):
    """All tests."""


def windows_over(
    seen: Sequence[tuple[float, float, int]], *, rate: float, burst: int
) -> list[tuple[float, float, int]]:
    """The windows that hold more tokens than rate x window + burst.

    A token was given at some time between sending and answer; it counts for a window only if both
    lie within it, so whatever is reported here is certain.
    """
    found = []
    for start in {sent for sent, _, _ in seen}:
        tokens = 0
        for sent, answered, granted in sorted(seen, key=lambda each: each[1]):
            if sent >= start:
                tokens += granted
                if tokens > rate * (answered - start) + burst + 1e-6:
                    found.append((start, answered, tokens))
    return found
