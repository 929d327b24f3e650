"""Outages of the store, for holders and acquirers, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest
from tests.leases.virtual import ScriptedStore, client, in_virtual_time

from moored.kernel import Clock
from moored.leases import (
    Grant,
    Lease,
    Leases,
    Policy,
    Request,
    StoreMisconfigured,
    StoreUnavailable,
)
from moored.testing import Sim

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.pure]


async def some(acquired: object) -> Lease:
    lease = await acquired  # type: ignore[misc]
    assert isinstance(lease, Lease)
    return lease


# -- local leases --------------------------------------------------------------------------------


@in_virtual_time
async def test_a_local_lease_is_marked_as_local(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.break_down()
        lease = await some(leases.acquire("db", limit=5))
        assert lease.local
        assert lease.live
        assert lease.fence == 0
        assert lease.remaining() == float("inf")
        assert repr(lease) == "<Lease 'db' of orders, local fence 0: held by this process alone>"
        await lease.renew()
        now = leases.statistics()
        assert (now.local, now.local_granted, now.outages, now.available) == (1, 1, 1, False)
        assert "local lease of 'db'" in leases.recorder.explain("leases")
        store.error = None


@in_virtual_time
async def test_a_local_lease_is_exchanged_also_if_no_call_was_sent(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        await asyncio.sleep(1.0)
        store.break_down()
        with pytest.raises(StoreUnavailable):
            await leases.held()
        # So soon after a failure no call is sent, and there is nothing to release.
        asked = store.calls["acquire"]
        lease = await some(leases.acquire("db", limit=5))
        assert lease.local
        assert store.calls["acquire"] == asked
        store.error = None
        await asyncio.sleep(60.0)
        assert not lease.local


@in_virtual_time
async def test_the_local_limit_counts_what_this_process_holds(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        await some(leases.acquire("db", limit=3))
        store.break_down()
        assert (await some(leases.acquire("db", limit=3))).local
        assert (await some(leases.acquire("db", limit=3))).local
        assert await leases.acquire("db", limit=3) is None
        assert (await some(leases.acquire("other", limit=3))).local
        assert leases.statistics().local_refused == 1
        store.error = None


@in_virtual_time
async def test_local_limit_overrides_the_limit_of_the_key(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, local_limit=1) as leases:
        store.break_down()
        await some(leases.acquire("db", limit=100))
        assert await leases.acquire("db", limit=100) is None
        store.error = None


@in_virtual_time
async def test_an_exclusive_lease_is_never_local(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.break_down()
        with pytest.raises(StoreUnavailable):
            await leases.acquire("boss", limit=1)
        with pytest.raises(StoreUnavailable):
            async with leases.exclusive("boss"):
                raise AssertionError
        store.error = None


@in_virtual_time
async def test_local_leases_become_real_when_the_store_is_back(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.break_down()
        held = [await some(leases.acquire("db", limit=5)) for _ in range(3)]
        await asyncio.sleep(60.0)
        store.error = None
        await asyncio.sleep(3.0)
        assert [lease.local for lease in held] == [False] * 3
        assert all(lease.live and lease.fence for lease in held)
        assert {lease.id for lease in held} == {each.id for each in await leases.held()}
        now = leases.statistics()
        assert (now.local, now.exchanged, now.held) == (0, 3, 3)
        await asyncio.sleep(500.0)
        assert all(lease.live for lease in held)


@in_virtual_time
async def test_local_leases_that_the_store_refuses_are_lost(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases, client(store) as others:
        store.break_down()
        mine = [await some(leases.acquire("db", limit=3)) for _ in range(3)]
        theirs = [await some(others.acquire("db", limit=3)) for _ in range(3)]
        told: list[str] = []
        for lease in (*mine, *theirs):
            lease.on_lost(lambda error: told.append(error.reason))
        store.error = None
        await asyncio.sleep(5.0)
        assert told == ["refused"] * 3
        assert sum(lease.live for lease in (*mine, *theirs)) == 3
        assert leases.statistics().lost_refused + others.statistics().lost_refused == 3


@in_virtual_time
async def test_a_released_local_lease_is_not_exchanged(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.break_down()
        lease = await some(leases.acquire("db", limit=3))
        await lease.release()
        store.error = None
        await asyncio.sleep(5.0)
        assert store.calls["acquire"] == 1
        assert list(await leases.held()) == []


@in_virtual_time
async def test_a_local_lease_released_during_its_exchange_is_released_in_the_store(
    sim: Sim,
) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.break_down()
        lease = await some(leases.acquire("db", limit=3))
        store.error, store.takes = None, 1.0
        await store.called("acquire", 2)
        await lease.release()
        await asyncio.sleep(5.0)
        assert list(await leases.held()) == []
        assert leases.statistics().undone == 1


@in_virtual_time
async def test_an_exchange_that_timed_out_is_repeated_with_a_new_id(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.break_down()
        lease = await some(leases.acquire("db", limit=3))
        first = lease.id
        store.error, store.hangs = None, "after"
        await store.called("acquire", 2)
        store.hangs = ""
        await asyncio.sleep(20.0)
        assert not lease.local
        assert lease.id != first
        assert [each.id for each in await leases.held()] == [lease.id]


# -- holders -------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_short_outage_is_not_noticed_by_holders(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await some(leases.acquire("db", limit=1))
        await asyncio.sleep(100.0)
        store.break_down()
        await asyncio.sleep(110.0)
        store.error = None
        await asyncio.sleep(3.0)
        assert lease.live
        assert lease.remaining() > 170.0
        await asyncio.sleep(500.0)
        assert lease.live


@in_virtual_time
async def test_holders_are_notified_in_a_long_outage(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        held = [await some(leases.acquire("db", limit=10)) for _ in range(10)]
        store.break_down()
        errors = [await lease.lost() for lease in held]
        assert sim.now == 175.0
        assert {error.reason for error in errors if error} == {"expired"}
        assert "connection refused" in leases.recorder.explain("leases")
        store.error = None


@in_virtual_time
async def test_an_exclusive_lease_expires_in_a_long_outage(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await some(leases.acquire("boss", limit=1))
        store.break_down()
        error = await lease.lost()
        assert error is not None
        assert (sim.now, error.reason) == (175.0, "expired")
        store.error = None


@in_virtual_time
async def test_held_leases_become_local_in_a_long_outage_and_real_after_it(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases, client(store) as others:
        held = [await some(leases.acquire("db", limit=10)) for _ in range(10)]
        store.break_down()
        await asyncio.sleep(1000.0)
        assert all(lease.live and lease.local and lease.fence == 0 for lease in held)
        assert leases.statistics().local == 10
        assert await leases.acquire("db", limit=10) is None, "no more than the limit"
        store.error = None
        await asyncio.sleep(5.0)
        assert all(lease.live and not lease.local and lease.fence for lease in held)
        assert {each.id for each in await others.held()} == {lease.id for lease in held}
        await asyncio.sleep(1000.0)
        assert all(lease.live for lease in held)
        assert leases.statistics().lost_expired == 0


@in_virtual_time
async def test_local_leases_are_exchanged_one_by_one_at_a_limited_rate(sim: Sim) -> None:
    """Every process of the cluster does this in the moment in which the store is back."""
    asked: list[float] = []

    class Noting(ScriptedStore):
        async def acquire(self, request: Request) -> Grant | None:
            asked.append(sim.now)
            return await super().acquire(request)

    store = Noting()
    async with client(store) as leases:
        held = [await some(leases.acquire("db", limit=50)) for _ in range(50)]
        store.break_down()
        await asyncio.sleep(1000.0)
        assert all(lease.local for lease in held)
        store.error = None
        asked.clear()
        await asyncio.sleep(30.0)
        assert not any(lease.local for lease in held)
        assert len(asked) == 50
        pauses = [later - earlier for earlier, later in pairwise(asked)]
        assert min(pauses) > 0.0099


@in_virtual_time
async def test_of_the_held_leases_as_many_become_local_as_the_local_limit_allows(
    sim: Sim,
) -> None:
    store = ScriptedStore()
    async with client(store, local_limit=2) as leases:
        held = [await some(leases.acquire("db", limit=10)) for _ in range(5)]
        store.break_down()
        await asyncio.sleep(200.0)
        assert sum(lease.live for lease in held) == 2
        assert leases.statistics().lost_expired == 3
        store.error = None


@in_virtual_time
async def test_leases_that_expire_just_after_an_outage_are_renewed_or_exchanged(sim: Sim) -> None:
    """They could not be renewed in it, and their renewal is under way."""
    store = ScriptedStore()
    async with client(store) as leases:
        held = []
        for _ in range(20):
            held.append(await some(leases.acquire("db", limit=20, ttl=60.0)))
            await asyncio.sleep(0.5)
        store.break_down()
        await asyncio.sleep(50.0)
        store.error, store.takes = None, 1.2
        while not leases.statistics().available:
            await asyncio.sleep(0.01)
            with suppress(StoreUnavailable):
                await leases.held()
        await asyncio.sleep(60.0)
        assert [lease.live and not lease.local for lease in held] == [True] * 20


@in_virtual_time
async def test_leases_that_expire_while_the_store_answers_are_lost(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await some(leases.acquire("db", limit=10))
        # As in a process that was stopped: nothing is known of an outage.
        leases._table._deadlines.set(lease.id, sim.now)
        leases._keeper._expire()
        assert lease.error is not None
        assert lease.error.reason == "expired"


# -- acquirers -----------------------------------------------------------------------------------


@in_virtual_time
async def test_calls_fail_at_once_while_the_store_is_down(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.break_down()
        with pytest.raises(StoreUnavailable, match="connection refused"):
            await leases.acquire("db", limit=5)
        with pytest.raises(StoreUnavailable, match=r"has not answered for 0.0 s; next attempt"):
            await leases.acquire("db", limit=5)
        assert store.calls["acquire"] == 1
        store.error = None
        await asyncio.sleep(3.0)
        assert await leases.acquire("db", limit=5) is not None
        assert leases.statistics().available


@in_virtual_time
async def test_no_call_hangs_while_the_store_hangs(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.hangs = "before"
        tasks = [asyncio.create_task(leases.acquire("db", limit=5)) for _ in range(50)]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sim.now == 5.0
        with pytest.raises(StoreUnavailable):
            await leases.acquire("db", limit=5)
        assert sim.now == 5.0
        # One at a time looks whether it is back; the others know at once.
        await asyncio.sleep(10.0)
        before = store.calls["acquire"] + store.calls["release"]
        started = sim.now
        tasks = [asyncio.create_task(leases.acquire("db", limit=5)) for _ in range(50)]
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), StoreUnavailable) for task in tasks)
        assert store.calls["acquire"] + store.calls["release"] - before <= 1
        assert sim.now - started <= 5.0
        store.hangs = ""
        await asyncio.sleep(10.0)
        assert await leases.acquire("db", limit=5) is not None


@in_virtual_time
async def test_a_short_ttl_shortens_the_timeout(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.hangs = "before"
        with pytest.raises(StoreUnavailable, match=r"within 0.9 s"):
            await leases.acquire("db", limit=5, ttl=2.0)
        store.hangs = ""


# -- the start -----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_client_opens_while_its_store_is_down(sim: Sim) -> None:
    store = ScriptedStore()
    store.break_down()
    async with client(store) as leases:
        assert not leases.statistics().available
        lease = await some(leases.acquire("db", limit=5))
        assert lease.local
        assert store.calls["acquire"] == 0
        store.error = None
        await asyncio.sleep(5.0)
        assert lease.fence >= 1
        assert leases.statistics().available


@in_virtual_time
async def test_a_client_opens_while_its_store_hangs(sim: Sim) -> None:
    store = ScriptedStore()
    store.hangs = "before"
    async with client(store) as leases:
        assert sim.now == 5.0
        lease = await some(leases.acquire("db", limit=5))
        store.hangs = ""
        await asyncio.sleep(20.0)
        assert not lease.local


@in_virtual_time
async def test_a_store_found_misconfigured_after_the_start_raises(sim: Sim) -> None:
    """The store is down at the start; then it answers, and refuses: that is not an outage."""
    store = ScriptedStore()
    store.break_down()
    async with client(store) as leases:
        assert (await some(leases.acquire("db", limit=5))).local
        store.error = StoreMisconfigured("permission denied")
        await asyncio.sleep(5.0)
        with pytest.raises(StoreMisconfigured, match="permission denied"):
            await leases.acquire("db", limit=5)
        store.error = None
        await asyncio.sleep(5.0)
        assert leases.statistics().exchanged == 1


@in_virtual_time
async def test_concurrent_failures_count_as_one_for_the_backoff(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.hangs = "before"
        tasks = [asyncio.create_task(leases.acquire("db", limit=5)) for _ in range(50)]
        await asyncio.gather(*tasks, return_exceptions=True)
        store.hangs = ""
        await asyncio.sleep(0.2)
        assert await leases.acquire("db", limit=5) is not None


@in_virtual_time
async def test_open_fails_with_refuse_while_the_store_is_down(sim: Sim) -> None:
    store = ScriptedStore()
    store.break_down()
    leases = client(store, on_unavailable="refuse")
    with pytest.raises(StoreUnavailable, match="connection refused"):
        await leases.open()
    assert repr(leases) == "<Leases the store: closed, 0 leases>"


@in_virtual_time
async def test_close_does_not_wait_for_a_dead_store(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await some(leases.acquire("db", limit=5))
        store.break_down()
        await leases.acquire("db", limit=5)
        before = sim.now
    assert sim.now - before < 1.0
    assert lease.error is not None
    # The lease, and the one that may have been given although the answer was an error.
    assert leases.statistics().left_to_time == 2


class Halting(ScriptedStore):
    """A store whose answer comes when the process has been stopped for a minute."""

    halted = 0.0

    async def acquire(self, request: Request) -> Grant | None:
        grant = await super().acquire(request)
        self.halted += 60.0
        return grant


@in_virtual_time
async def test_a_grant_that_arrives_too_late_raises(sim: Sim) -> None:
    """The timeout does not help here: a process that is stopped does not look at its timers."""
    store = Halting()
    clock = Clock(lambda: sim.now + store.halted)
    policy = Policy(on_unavailable="refuse")
    async with Leases(store, service_name="orders", policy=policy, clock=clock) as leases:
        with pytest.raises(StoreUnavailable, match=r"too late for its ttl of 30 s"):
            await leases.acquire("db", limit=1, ttl=30.0)
        assert leases.statistics().held == 0
