"""The counter layout: its schema, and everything that would make the counter drift."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.leases.conformance import request
from tests.leases.dynamodb.conftest import Opener
from tests.leases.dynamodb.fault_injection import cancelled, inject, items_of, lost, refusal, times
from tests.leases.dynamodb.servers import DynamoServer

from moored.leases import Request, StoreUnavailable
from moored.leases._dynamodb import _counter, _sweep
from moored.leases._dynamodb._items import number, text
from moored.leases.dynamodb import CounterStore, Swept
from moored.testing import Mutant, base_seed, mutant, scaled

SHORT = 0.3
#: For a lease of SHORT to end, and for the store to be sure of it.
OVER = SHORT + 0.3


class Opened:
    """Open stores of the counter layout that sweep only on `sweep()`."""

    def __init__(self, open_table: Opener) -> None:
        self._open = open_table

    async def __call__(self, **parameters: Any) -> CounterStore:
        store = await self._open(**{"layout": "counter", "sweep_every": 3600, **parameters})
        assert isinstance(store, CounterStore)
        return store


@pytest.fixture
def open_counter(open_table: Opener) -> Opened:
    return Opened(open_table)


@pytest.fixture
async def store(open_counter: Opened) -> CounterStore:
    return await open_counter()


async def counted(store: CounterStore, key: str = "db") -> tuple[int, int]:
    """What the counter says, and how many leases there are."""
    items = await items_of(store)
    counter = items.get(f"dsqllease_counter#{key}", {}).get("active", 0)
    return counter, sum(pk.startswith(f"dsqllease#{key}#") for pk in items)


async def delete(store: CounterStore, lease: Request) -> None:
    """Delete a lease as the server's TTL does, without decrementing the counter."""
    key = {"pk": text(f"dsqllease#{lease.key}#{lease.id}")}
    await store.link.call("delete_item", Key=key)


# -- schema ------------------------------------------------------------------------------------


async def test_the_connections_of_a_pool_are_counted_under_the_host_as_by_other_programs(
    store: CounterStore,
) -> None:
    usual, other = request("connections:db.example:5432"), request("connections:db.example:6543")
    assert await store.acquire(usual) is not None
    assert await store.acquire(other) is not None
    assert await counted(store, "db.example") == (1, 1)
    assert await counted(store, "db.example:6543") == (1, 1)
    assert [each.id for each in await store.held(usual.key)] == [usual.id]
    assert [each.id for each in await store.held("db.example")] == [usual.id]
    assert list(await store.renew([usual, other])) == [True, True]
    assert list(await store.release([usual, other, usual])) == [True, True, False]
    assert await counted(store, "db.example") == (0, 0)


async def test_the_items_have_the_documented_attributes(store: CounterStore) -> None:
    wanted = request("ep-1", ttl=100.0, limit=3)
    grant = await store.acquire(wanted)
    assert grant is not None
    items = await items_of(store)
    assert set(items) == {"dsqllease_counter#ep-1", f"dsqllease#ep-1#{wanted.id}"}
    now = time.time()
    counter = items["dsqllease_counter#ep-1"]
    assert counter.pop("updated_ms") == pytest.approx(now * 1000, abs=5000)
    assert counter == {"pk": "dsqllease_counter#ep-1", "active": 1, "grants": 1}
    lease = items[f"dsqllease#ep-1#{wanted.id}"]
    assert lease.pop("created_ms") == pytest.approx(now * 1000, abs=5000)
    assert lease["ttl_epoch"] == -(-lease["expires_ms"] // 1000)
    assert lease.pop("ttl_epoch") == pytest.approx(now + 100, abs=5)
    assert lease.pop("expires_ms") == pytest.approx((now + 100) * 1000, abs=5000)
    assert lease == {
        "pk": f"dsqllease#ep-1#{wanted.id}",
        "lease_key": "ep-1",
        "fence": grant.fence,
        "service_name": "orders",
        "owner": "pool-1",
        "host": "host-1",
        "pid": 4711,
    }
    await store.release([wanted])
    items = await items_of(store)
    assert list(items) == ["dsqllease_counter#ep-1"]
    assert items["dsqllease_counter#ep-1"]["active"] == 0


async def test_a_renewal_extends_the_ttl_attribute(
    store: CounterStore,
) -> None:
    wanted = request(ttl=10.0)
    await store.acquire(wanted)
    assert list(await store.renew([Request("db", wanted.id, 1, 500.0, wanted.holder)])) == [True]
    lease = (await items_of(store))[f"dsqllease#db#{wanted.id}"]
    assert lease["ttl_epoch"] == pytest.approx(time.time() + 500, abs=5)


@pytest.mark.parametrize("wild", ["a#b", "50%", "%23", "#", "%"])
async def test_an_id_with_the_separator_in_it_keeps_its_shape(
    store: CounterStore, wild: str
) -> None:
    wanted = request("x", known=wild, limit=3)
    assert await store.acquire(wanted) is not None
    assert await store.acquire(request("x#a", known="b", limit=3)) is not None
    assert [held.id for held in await store.held("x")] == [wild]
    assert list(await store.release([wanted])) == [True]


async def test_leases_of_another_program_count_and_end(store: CounterStore) -> None:
    """One that writes by the same schema, and knows nothing of what is ours."""
    await _write_foreign(store, "ended", ttl_epoch=int(time.time()) - 10)
    await _write_foreign(store, "live", ttl_epoch=int(time.time()) + 100)
    assert await counted(store) == (2, 2)
    assert [held.id for held in await store.held("db")] == ["live"]
    assert await store.acquire(request(limit=2)) is not None  # in the place of the ended one
    assert await store.acquire(request(limit=2)) is None
    assert list(await store.release([request(known="live", limit=2)])) == [True]
    assert await counted(store) == (1, 1)


async def _write_foreign(store: CounterStore, lease: str, *, ttl_epoch: int) -> None:
    await store.link.call(
        "update_item",
        Key={"pk": text("dsqllease_counter#db")},
        UpdateExpression="ADD active :one SET updated_ms = :now",
        ExpressionAttributeValues={":one": number(1), ":now": number(1)},
    )
    item = {
        "pk": text(f"dsqllease#db#{lease}"),
        "ttl_epoch": number(ttl_epoch),
        "service_name": text("their-service"),
        "created_ms": number(1),
    }
    await store.link.call("put_item", Item=item)


# -- requests ----------------------------------------------------------------------------------


async def test_each_call_takes_the_documented_number_of_requests(store: CounterStore) -> None:
    async def spent(operation: Any) -> dict[str, int]:
        before = store.link.requests.copy()
        await operation
        return dict(store.link.requests - before)

    wanted = [request(limit=60) for _ in range(60)]
    assert await spent(store.acquire(wanted[0])) == {"transact_write_items": 1}
    await asyncio.gather(*map(store.acquire, wanted[1:]))
    assert await spent(store.acquire(request(limit=60))) == {"transact_write_items": 1, "scan": 1}
    # A full key is not scanned again before one of its leases may have ended.
    assert await spent(store.acquire(request(limit=60))) == {"transact_write_items": 1}
    assert await spent(store.renew(wanted)) == {"update_item": 60}
    assert await spent(store.release(wanted)) == {"transact_write_items": 1}
    assert await counted(store) == (0, 0)


async def test_concurrent_refusals_scan_once(store: CounterStore) -> None:
    await store.acquire(request())
    before = store.link.requests.copy()
    assert await asyncio.gather(*(store.acquire(request()) for _ in range(8))) == [None] * 8
    assert (store.link.requests - before)["scan"] == 1


async def test_a_conflict_is_not_a_refusal(store: CounterStore) -> None:
    conflict = cancelled("TransactionConflict", "None")
    await inject(store, before=times(3, "transact_write_items", conflict))
    wanted = request()
    assert await store.acquire(wanted) is not None
    assert store.link.retries == 3
    await inject(
        store, before=times(2, "transact_write_items", cancelled("None", "TransactionConflict"))
    )
    assert list(await store.release([wanted])) == [True]
    assert await counted(store) == (0, 0)


async def test_an_acquire_whose_response_was_lost_counts_once(store: CounterStore) -> None:
    await inject(store, after=times(1, "transact_write_items", lost()))
    wanted = request(limit=2)
    assert await store.acquire(wanted) is not None
    assert await counted(store) == (1, 1)
    await inject(store, after=times(1, "transact_write_items", lost()))
    assert list(await store.release([wanted])) == [True]
    assert await counted(store) == (0, 0)


async def test_a_repeated_acquire_after_a_lost_response_gets_the_same_lease(
    store: CounterStore,
) -> None:
    gone = False

    def before(operation: str, arguments: Mapping[str, Any]) -> Exception | None:
        return lost() if gone else None

    def after(operation: str, arguments: Mapping[str, Any]) -> Exception | None:
        nonlocal gone
        gone = operation == "transact_write_items"
        return lost() if gone else None

    client = await store.link._connected()
    await inject(store, before=before, after=after)
    wanted = request(limit=2)
    with pytest.raises(StoreUnavailable):
        await store.acquire(wanted)
    store.link._client = client
    assert await store.acquire(wanted) is not None
    assert await counted(store) == (1, 1)


async def test_a_client_whose_clock_is_behind_proposes_a_greater_fence(
    open_counter: Opened,
) -> None:
    stores = [await open_counter(), await open_counter(own_time=True)]
    stores[1].link.time._low -= 100.0
    fences = []
    for turn in range(6):
        wanted = request()
        grant = await stores[turn % 2].acquire(wanted)
        assert grant is not None
        fences.append(grant.fence)
        await stores[0].release([wanted])
    assert fences == sorted(set(fences))


# -- drift -------------------------------------------------------------------------------------


async def test_a_sweep_deletes_expired_leases_and_decrements_the_counter(
    store: CounterStore,
) -> None:
    ended = [request("db", limit=150, ttl=SHORT) for _ in range(3)]
    live = [request("db", limit=150) for _ in range(2)]
    other = request("other", ttl=SHORT)
    for each in (*ended, *live, other):
        await store.acquire(each)
    await asyncio.sleep(OVER)
    assert await counted(store) == (5, 5)
    assert await store.sweep() == Swept(ended=4, corrected=0)
    assert await counted(store) == (2, 2)
    assert await counted(store, "other") == (0, 0)
    assert await store.sweep() == Swept(0, 0)


async def test_more_leases_than_fit_into_one_transaction_are_released(store: CounterStore) -> None:
    wanted = [request("db", limit=150) for _ in range(120)]
    for start in range(0, 120, 20):
        await asyncio.gather(*map(store.acquire, wanted[start : start + 20]))
    assert list(await store.release(wanted[:110])) == [True] * 110
    assert await counted(store) == (10, 10)


async def test_concurrent_sweeps_decrement_the_counter_once(open_counter: Opened) -> None:
    stores = [await open_counter() for _ in range(4)]
    for _ in range(5):
        await stores[0].acquire(request(limit=9, ttl=SHORT))
    live = request(limit=9)
    await stores[0].acquire(live)
    await asyncio.sleep(OVER)
    swept = await asyncio.gather(*(store.sweep() for store in stores))
    assert sum(each.ended for each in swept) == 5
    assert await counted(stores[0]) == (1, 1)


async def test_a_lease_renewed_since_the_scan_is_not_ended(store: CounterStore) -> None:
    wanted = request(limit=2, ttl=SHORT)
    await store.acquire(wanted)
    await asyncio.sleep(OVER)
    key = {"pk": text(f"dsqllease#db#{wanted.id}")}
    await store.link.call(
        "update_item",
        Key=key,
        UpdateExpression="SET expires_ms = :later",
        ExpressionAttributeValues={":later": number(round(time.time() * 1000) + 60_000)},
    )
    assert await store._sweeper.end([("db", wanted.id)]) == set()
    assert await counted(store) == (1, 1)


async def test_a_counter_is_corrected_after_the_server_deleted_leases(
    store: CounterStore, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [request(limit=5) for _ in range(5)]
    for each in wanted:
        await store.acquire(each)
    await delete(store, wanted[0])
    await delete(store, wanted[1])
    assert await counted(store) == (5, 3)
    with caplog.at_level(logging.WARNING, "moored.leases"):
        assert await store.sweep() == Swept(ended=0, corrected=1)
    assert "corrected the counter of 'db' from 5 to 3" in caplog.text
    assert await counted(store) == (3, 3)
    grants = [await store.acquire(request(limit=5)) for _ in range(3)]
    assert [grant is not None for grant in grants] == [True, True, False]


async def test_an_acquire_refused_by_a_wrong_counter_gets_a_lease(store: CounterStore) -> None:
    wanted = [request(limit=2) for _ in range(2)]
    for each in wanted:
        await store.acquire(each)
    await delete(store, wanted[0])
    assert await store.acquire(request(limit=2)) is not None
    assert await counted(store) == (2, 2)


async def test_releasing_a_deleted_lease_does_not_decrement_the_counter(
    store: CounterStore,
) -> None:
    wanted = [request(limit=5) for _ in range(3)]
    for each in wanted:
        await store.acquire(each)
    await delete(store, wanted[0])
    assert list(await store.release(wanted[:2])) == [False, True]
    assert await counted(store) == (2, 1)
    await store.sweep()
    assert await counted(store) == (1, 1)


@pytest.mark.parametrize("said", [0, 1, 7])
async def test_leases_end_although_their_counter_is_wrong(store: CounterStore, said: int) -> None:
    wanted = [request(limit=5) for _ in range(3)]
    for each in wanted:
        await store.acquire(each)
    await store.link.call(
        "update_item",
        Key={"pk": text("dsqllease_counter#db")},
        UpdateExpression="SET active = :said",
        ExpressionAttributeValues={":said": number(said)},
    )
    assert list(await store.release(wanted)) == [True, True, True]
    # Never below zero: that would be room for more than the limit.
    assert await counted(store) == (max(said - 3, 0), 0)
    await store.sweep()
    assert await counted(store) == (0, 0)


async def test_a_missing_counter_is_created_again(store: CounterStore) -> None:
    wanted = request(limit=2)
    await store.acquire(wanted)
    await store.link.call("delete_item", Key={"pk": text("dsqllease_counter#db")})
    assert await store.sweep() == Swept(ended=0, corrected=1)
    assert await counted(store) == (1, 1)


async def test_a_correction_does_not_overwrite_concurrent_changes(
    store: CounterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [request(limit=5) for _ in range(3)]
    for each in wanted:
        await store.acquire(each)
    await delete(store, wanted[0])
    other = request(limit=5)
    leases = store._sweeper.leases

    async def leases_and_a_grant(key: str | None = None) -> Any:
        found = await leases(key)
        await store.acquire(other)
        return found

    monkeypatch.setattr(store._sweeper, "leases", leases_and_a_grant)
    assert await store._sweeper._correct("db") == 0
    assert await counted(store) == (4, 3)
    monkeypatch.undo()
    assert await store._sweeper._correct("db") == 1
    assert await counted(store) == (3, 3)


async def test_one_client_at_a_time_sweeps_in_the_background(open_counter: Opened) -> None:
    keeper = await open_counter()
    for _ in range(3):
        await keeper.acquire(request(limit=9, ttl=SHORT))
    sweepers = [await open_counter(sweep_every=0.4) for _ in range(3)]
    deadline = time.monotonic() + 30.0
    while sum(each._sweeper.total.ended for each in sweepers) < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert await counted(keeper) == (0, 0)
    assert sum(each._sweeper.total.ended for each in sweepers) == 3


async def test_the_sweeper_continues_after_an_outage(
    open_counter: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_counter(sweep_every=0.1)
    await store.acquire(request(limit=9, ttl=SHORT))
    await inject(store, before=times(8, "update_item", refusal("ThrottlingException")))
    deadline = time.monotonic() + 30.0
    while store._sweeper.total.ended == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert "could not sweep" in caplog.text


HOLDER = """
import asyncio, sys
from moored.leases import connect

async def main():
    async with connect(sys.argv[1], service_name="doomed", on_unavailable="refuse") as leases:
        held = [await leases.acquire("db", limit=4, ttl=float(sys.argv[2])) for _ in range(3)]
        assert all(held)
        print("holding", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_the_lease_of_a_killed_holder_is_subtracted(
    open_counter: Opened, server: DynamoServer, table: str
) -> None:
    store = await open_counter()
    live = request(limit=4)
    assert await store.acquire(live) is not None
    url = server.url(table, layout="counter", skew=0, sweep_every=3600)
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, url, "3"), stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"holding\n"
    assert await counted(store) == (4, 4)
    assert await store.acquire(request(limit=4)) is None
    holder.kill()
    await holder.wait()
    deadline = time.monotonic() + 30.0
    while await counted(store) != (1, 1):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
        await store.sweep()
    assert await store.acquire(request(limit=4)) is not None


# -- a story with all of it, and defects that it must notice -------------------------------------


class Drifted(AssertionError):
    """The counter does not say how many leases there are."""


async def story(stores: list[CounterStore], chance: random.Random, steps: int) -> None:
    """Leases come and go in every way at once; after each step the counter must be right."""
    held: list[Request] = []
    for _ in range(steps):
        store = chance.choice(stores)
        match chance.randrange(4):
            case 0 | 1:
                wanted = request(limit=4)
                if await store.acquire(wanted) is not None:
                    held.append(wanted)
            case 2 if held:
                # Two clients end the same lease, as a holder and an operator would.
                lease = held.pop(chance.randrange(len(held)))
                await asyncio.gather(*(each.release([lease]) for each in stores))
            case 3 if held:
                # Another client tries to end expired leases, which have been renewed meanwhile.
                await store._sweeper.end([("db", lease.id) for lease in held])
        said, there = await counted(stores[0])
        if not said == there == len(held):
            raise Drifted(f"the counter says {said}, there are {there}, {len(held)} are held")


ANY = "attribute_not_exists(#never_there) AND NOT (:now < :now_s)"
MUTANTS = [
    mutant(_counter, "LIVE", ANY, name="a release that counts off what is gone"),
    mutant(_sweep, "ENDED", ANY, name="a sweep that ends what was renewed"),
]


@pytest.mark.parametrize("defect", [None, *MUTANTS], ids=lambda d: d.name if d else "none")
async def test_the_counter_never_drifts(open_counter: Opened, defect: Mutant | None) -> None:
    stores = [await open_counter() for _ in range(2)]
    steps = scaled(400, least=60)
    if defect is None:
        await story(stores, random.Random(base_seed()), steps)
        return
    with defect, pytest.raises((Drifted, StoreUnavailable)):
        await story(stores, random.Random(base_seed()), steps)
