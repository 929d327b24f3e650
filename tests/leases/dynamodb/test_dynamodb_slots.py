"""The slot layout: how many requests it takes, and which faults it survives."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.leases.conformance import request
from tests.leases.dynamodb.conftest import Opener
from tests.leases.dynamodb.fault_injection import Outage, inject, items_of, lost, refusal, times

from moored.kernel import Clock
from moored.leases import Request, StoreUnavailable
from moored.leases._dynamodb import _slot_reader
from moored.leases._dynamodb._items import number, text
from moored.leases._dynamodb._link import DynamoLink
from moored.leases._dynamodb._plan import read_order
from moored.leases._dynamodb._slot_reader import SlotView
from moored.leases.dynamodb import SlotStore
from moored.testing import scaled

#: A key that is too large to be read whole.
LARGE = scaled(10_000, least=1500)


class Opened:
    """Opens stores with slots."""

    def __init__(self, open_table: Opener) -> None:
        self._open = open_table

    async def __call__(self, **parameters: Any) -> SlotStore:
        store = await self._open(**parameters)
        assert isinstance(store, SlotStore)
        return store


@pytest.fixture
def open_slots(open_table: Opener) -> Opened:
    return Opened(open_table)


@pytest.fixture
async def store(open_slots: Opened) -> SlotStore:
    return await open_slots()


class Spent:
    """How many requests something took."""

    def __init__(self, store: SlotStore) -> None:
        self._link: DynamoLink = store.link
        self._before = store.link.requests.copy()

    @property
    def requests(self) -> dict[str, int]:
        return dict(self._link.requests - self._before)


async def occupy(
    store: SlotStore, key: str, numbers: range, *, expires_ms: int, fence: int = 1
) -> None:
    """Fill slots, as if other clients held them."""
    puts = [
        {
            "PutRequest": {
                "Item": {
                    "pk": text(f"moored_slot#{key}"),
                    "slot": number(n),
                    "id": text(f"{key}-{n}"),
                    "expires_ms": number(expires_ms),
                    "fence": number(fence),
                    "service_name": text("filler " * 20),
                }
            }
        }
        for n in numbers
    ]
    table = store.link.config.table
    batches = [puts[n : n + 25] for n in range(0, len(puts), 25)]
    for start in range(0, len(batches), 8):
        await asyncio.gather(
            *(
                store.link.send("batch_write_item", RequestItems={table: batch})
                for batch in batches[start : start + 8]
            )
        )


def in_an_hour() -> int:
    return round(time.time() * 1000) + 3_600_000


# -- how many requests -------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 10])
async def test_an_acquire_takes_a_query_and_an_update(store: SlotStore, limit: int) -> None:
    wanted = request(limit=limit)
    spent = Spent(store)
    assert await store.acquire(wanted) is not None
    assert spent.requests == {"query": 1, "update_item": 1}

    spent = Spent(store)
    assert list(await store.renew([wanted])) == [True]
    assert spent.requests == {"update_item": 1}

    spent = Spent(store)
    assert await store.acquire(wanted) is not None  # its place is known
    assert spent.requests == {"update_item": 1}

    spent = Spent(store)
    assert list(await store.release([wanted])) == [True]
    assert spent.requests == {"update_item": 1}


async def test_a_refusal_takes_one_query(store: SlotStore) -> None:
    await store.acquire(request())
    spent = Spent(store)
    assert await store.acquire(request()) is None
    assert spent.requests == {"query": 1}


async def test_each_lease_is_renewed_and_released_by_one_update(store: SlotStore) -> None:
    wanted = [request("db", limit=120) for _ in range(60)]
    await asyncio.gather(*map(store.acquire, wanted))
    spent = Spent(store)
    assert all(await store.renew(wanted))
    assert spent.requests == {"update_item": 60}
    spent = Spent(store)
    assert all(await store.release(wanted))
    assert spent.requests == {"update_item": 60}


async def test_leases_of_another_client_are_found_by_one_query(open_slots: Opened) -> None:
    first, second = await open_slots(), await open_slots()
    wanted = [request("db", limit=30) for _ in range(20)]
    await asyncio.gather(*map(first.acquire, wanted))
    spent = Spent(second)
    assert all(await second.renew(wanted))
    assert spent.requests == {"query": 1, "update_item": 20}


async def test_the_last_free_slot_of_many_is_found_in_a_few_requests(store: SlotStore) -> None:
    await occupy(store, "db", range(LARGE), expires_ms=in_an_hour())
    free = LARGE // 3
    await occupy(store, "db", range(free, free + 1), expires_ms=0)
    spent = Spent(store)
    wanted = request("db", limit=LARGE)
    assert await store.acquire(wanted) is not None
    # One that looks for leases above the limit, one for a small page, and at most one for each end
    # of the rest and each megabyte of it: not one for each slot.
    megabytes = LARGE * 300 / 2**20
    assert spent.requests.pop("update_item") == 1
    assert 2 <= spent.requests["query"] <= 4 + megabytes
    assert (await items_of(store))[f"moored_slot#db/{free}"]["id"] == wanted.id


async def test_an_empty_large_key_is_read_in_part(store: SlotStore) -> None:
    spent = Spent(store)
    wanted = [request("db", limit=LARGE) for _ in range(5)]
    for each in wanted:
        assert await store.acquire(each) is not None
    assert spent.requests == {"query": 10, "update_item": 5}
    assert len(await store.held("db")) == 5


async def test_a_large_full_key_is_not_read_again_for_a_while(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_slot_reader, "PAGE", 8)
    monkeypatch.setattr(_slot_reader, "FULL_FOR", 10.0)
    wanted = [request("db", limit=20) for _ in range(20)]
    for each in wanted:
        assert await store.acquire(each) is not None
    assert await store.acquire(request("db", limit=20)) is None
    spent = Spent(store)
    assert await store.acquire(request("db", limit=20)) is None
    assert spent.requests == {}
    # A larger limit is read again, and so is the key after a release by this client.
    assert await store.acquire(request("db", limit=21)) is not None
    await store.release(wanted[:1])
    assert await store.acquire(request("db", limit=20)) is None, "21 leases, one released"
    await store.release(wanted[1:2])
    assert await store.acquire(request("db", limit=20)) is not None


async def test_a_lowered_limit_holds_in_a_large_key(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_slot_reader, "PAGE", 8)
    monkeypatch.setattr(_slot_reader, "FULL_FOR", 0.0)
    many = [request("db", limit=40) for _ in range(40)]
    await asyncio.gather(*map(store.acquire, many))
    assert len(await store.held("db")) == 40
    for gone in range(20):
        assert await store.acquire(request("db", limit=20)) is None
        await store.release([many[gone]])
    assert len(await store.held("db")) == 20
    assert await store.acquire(request("db", limit=20)) is None
    await store.release([many[20]])
    assert await store.acquire(request("db", limit=20)) is not None
    assert await store.acquire(request("db", limit=20)) is None


# -- what it survives --------------------------------------------------------------------------


async def test_an_acquire_whose_response_was_lost_is_repeated(store: SlotStore) -> None:
    await inject(store, after=times(1, "update_item", lost()))
    wanted = request(limit=3)
    grant = await store.acquire(wanted)
    assert grant is not None
    (held,) = await store.held("db")
    assert (held.id, held.fence) == (wanted.id, grant.fence)


async def test_a_repeated_acquire_after_an_outage_gets_the_same_lease(store: SlotStore) -> None:
    outage = Outage("update_item")
    await inject(store, before=outage.before, after=outage.after)
    wanted = request(limit=300)
    with pytest.raises(StoreUnavailable):
        await store.acquire(wanted)
    outage.over = True
    assert len(await store.held("db")) == 1
    assert await store.acquire(wanted) is not None
    assert len(await store.held("db")) == 1


async def test_a_lease_in_doubt_is_found_outside_the_read_range(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large key only some slots are read, and a free one may come before the lease's own."""
    monkeypatch.setattr(_slot_reader, "PAGE", 4)
    wanted = request("db", limit=40)
    (first, _), *_ = read_order(wanted.id, 40)
    await occupy(store, "db", range(40), expires_ms=in_an_hour())
    last = (first - 1) % 40
    await occupy(store, "db", range(last, last + 1), expires_ms=0)
    outage = Outage("update_item")
    await inject(store, before=outage.before, after=outage.after)
    with pytest.raises(StoreUnavailable):
        await store.acquire(wanted)
    outage.over = True
    await occupy(store, "db", range(first, first + 1), expires_ms=0)
    assert await store.acquire(wanted) is not None
    assert [held.id for held in await store.held("db")].count(wanted.id) == 1


async def test_a_lease_in_doubt_can_be_released(store: SlotStore) -> None:
    outage = Outage("update_item")
    await inject(store, before=outage.before, after=outage.after)
    wanted = request(limit=3)
    with pytest.raises(StoreUnavailable):
        await store.acquire(wanted)
    outage.over = True
    assert list(await store.release([wanted])) == [True]
    assert list(await store.held("db")) == []


async def test_a_throttled_renewal_is_sent_again(store: SlotStore) -> None:
    wanted = [request("db", limit=5) for _ in range(3)]
    await asyncio.gather(*map(store.acquire, wanted))
    client = await inject(store, before=times(2, "update_item", refusal("ThrottlingException")))
    gone = request("db", limit=5)
    assert list(await store.renew([gone, *wanted])) == [False, True, True, True]
    assert [operation for operation, _ in client.asked].count("update_item") == 5


async def test_throttled_renewals_raise_store_unavailable_in_the_end(store: SlotStore) -> None:
    wanted = request()
    await store.acquire(wanted)
    await inject(store, before=times(100, "update_item", refusal("ThrottlingException")))
    with pytest.raises(StoreUnavailable):
        await store.renew([wanted])


async def test_the_fence_grows_after_its_item_was_deleted(store: SlotStore) -> None:
    wanted = request()
    first = await store.acquire(wanted)
    await store.release([wanted])
    key = {"pk": text("moored_slot#db"), "slot": number(0)}
    await store.link.call("delete_item", Key=key)
    second = await store.acquire(request())
    assert first is not None
    assert second is not None
    assert second.fence > first.fence


async def test_a_fence_that_would_not_grow_is_not_written(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody had the slot between our look and our write, and his clock is ahead."""
    ahead = round(time.time() * 1000) + 500_000
    looks = 0
    look = store._slots.look

    async def look_and_be_late(wanted: Request) -> SlotView:
        nonlocal looks
        looks += 1
        view = await look(wanted)
        if looks == 1:
            await occupy(store, "db", range(1), expires_ms=0, fence=ahead)
        return view

    monkeypatch.setattr(store._slots, "look", look_and_be_late)
    grant = await store.acquire(request())
    assert grant is not None
    assert grant.fence == ahead + 1
    assert looks == 2


async def test_an_exclusive_fence_is_greater_than_those_of_a_larger_limit(
    store: SlotStore,
) -> None:
    fences = []
    for _ in range(4):
        wanted = [request(limit=3) for _ in range(3)]
        grants = [await store.acquire(each) for each in wanted]
        fences += [grant.fence for grant in grants if grant]
        await store.release(wanted)
    grant = await store.acquire(request(limit=1))
    assert grant is not None
    assert grant.fence > max(fences)


async def test_the_items_have_the_documented_attributes(store: SlotStore) -> None:
    wanted = request("db/orders", ttl=100.0)
    grant = await store.acquire(wanted)
    assert grant is not None
    (item,) = (await items_of(store)).values()
    now = time.time()
    assert item.pop("expires_ms") == pytest.approx((now + 100) * 1000, abs=5000)
    assert item.pop("created_ms") == pytest.approx(now * 1000, abs=5000)
    assert item.pop("ttl_epoch") == pytest.approx(now + 100 + 7 * 86400, abs=5)
    assert item == {
        "pk": "moored_slot#db/orders",
        "slot": 0,
        "id": wanted.id,
        "fence": grant.fence,
        "service_name": "orders",
        "owner": "pool-1",
        "host": "host-1",
        "pid": 4711,
    }
    await store.release([wanted])
    (item,) = (await items_of(store)).values()
    assert (item["expires_ms"], item["fence"]) == (0, grant.fence)


# -- clocks ------------------------------------------------------------------------------------


def wrong(by: float) -> Clock:
    """A machine whose wall clock is wrong by so many seconds."""
    return Clock(wall=lambda: time.time() + by)


async def test_a_client_with_a_fast_clock_takes_no_held_lease(open_slots: Opened) -> None:
    holder = await open_slots(own_time=True)
    fast = await open_slots(own_time=True, clock=wrong(3600.0))
    wanted = request(ttl=30.0)
    assert await holder.acquire(wanted) is not None
    assert await fast.acquire(request()) is None
    assert list(await fast.held("db")) != []
    assert list(await holder.renew([wanted])) == [True]


async def test_a_client_with_a_slow_clock_keeps_its_lease_for_its_ttl(
    open_slots: Opened,
) -> None:
    slow = await open_slots(own_time=True, clock=wrong(-3600.0))
    other = await open_slots(own_time=True)
    wanted = request(ttl=30.0)
    assert await slow.acquire(wanted) is not None
    assert await other.acquire(request()) is None
    (held,) = await other.held("db")
    assert 25.0 < held.expires_in <= 32.0
    assert list(await slow.release([wanted])) == [True]


async def test_an_expired_lease_is_not_reused_within_the_skew(
    open_slots: Opened,
) -> None:
    holder = await open_slots()
    careful = await open_slots(own_time=True, skew=30)
    await holder.acquire(request(ttl=0.05))
    await asyncio.sleep(0.3)
    assert await careful.acquire(request()) is None
    assert await holder.acquire(request()) is not None
