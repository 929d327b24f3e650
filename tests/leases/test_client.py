"""The client and its leases, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import pytest
from tests.leases.virtual import ScriptedStore, client, in_virtual_time

from moored.leases import (
    Lease,
    LeaseError,
    LeaseLost,
    Leases,
    Policy,
    StoreMisconfigured,
    connect,
)
from moored.testing import Sim, run_one

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.pure]


def is_over(lease: Lease) -> bool:
    return not lease.live


# -- holding -------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_lease_has_its_documented_properties(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=2, owner="pool-1")
        assert lease is not None
        assert (lease.key, lease.owner, lease.ttl, lease.local) == ("db", "pool-1", 180.0, False)
        assert lease.fence >= 1
        assert len(lease.id) == 32
        assert lease.live
        assert lease.error is None
        assert lease.remaining() == lease.deadline - sim.now == 175.0
        assert repr(lease) == f"<Lease 'db' of pool-1, fence {lease.fence}: 2 m 55 s left>"
        await lease.release()
        assert is_over(lease)
        assert lease.remaining() == 0.0
        assert repr(lease).endswith(": released>")


@in_virtual_time
async def test_acquire_returns_none_when_the_limit_is_reached(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        assert await leases.acquire("db", limit=1) is not None
        assert await leases.acquire("db", limit=1) is None
        now = leases.statistics()
        assert (now.held, now.acquired, now.refused) == (1, 1, 1)


@in_virtual_time
async def test_a_lease_is_renewed_while_it_is_held(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        await asyncio.sleep(1000.0)
        assert lease.live
        assert lease.remaining() > 175.0 - 60.0
        assert 16 <= store.calls["renew"] <= 17


@in_virtual_time
async def test_the_deadline_counts_from_the_request(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.takes = 4.0
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        assert lease.deadline == 175.0
        assert sim.now == 4.0
        await lease.renew()
        assert lease.deadline == 4.0 + 175.0


@in_virtual_time
async def test_a_release_makes_room_and_happens_once(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        await asyncio.gather(lease.release(), lease.release())
        await lease.release()
        assert store.calls["release"] == 1
        assert leases.statistics().released == 1
        assert await leases.acquire("db", limit=1) is not None


@in_virtual_time
async def test_a_block_releases_also_when_it_fails(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        with pytest.raises(ZeroDivisionError):
            async with lease:
                raise ZeroDivisionError
        assert list(await leases.held("db")) == []


@in_virtual_time
async def test_a_released_lease_cannot_be_renewed(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        await lease.release()
        with pytest.raises(LeaseError, match="has been released: acquire another"):
            await lease.renew()


@in_virtual_time
async def test_close_releases_all_leases_in_batches(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, batch=10) as leases:
        for _ in range(25):
            await leases.acquire("db", limit=25)
    assert store.batches == [("release", 10), ("release", 10), ("release", 5)]
    assert list(await store.held()) == []


@in_virtual_time
async def test_a_close_that_is_cancelled_goes_on_and_the_next_close_waits_for_it(sim: Sim) -> None:
    store = ScriptedStore()
    leases = client(store)
    await leases.open()
    lease = await leases.acquire("db", limit=1)
    assert lease is not None
    closing = asyncio.create_task(leases.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await leases.close()
    assert is_over(lease)
    assert await store.held() == []


@in_virtual_time
async def test_close_notifies_the_holders(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        waiting = asyncio.create_task(lease.lost())
        await asyncio.sleep(0)
    error = await waiting
    assert error is not None
    assert error.reason == "closed"
    with pytest.raises(LeaseError, match=r"is not open: create a new one with connect\(\)"):
        await leases.acquire("db", limit=1)


# -- losses --------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_holder_is_notified_at_the_deadline(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        told: list[tuple[float, LeaseLost]] = []
        lease.on_lost(lambda error: told.append((sim.now, error)))
        store.hangs = "before"
        error = await lease.lost()
        assert error is not None
        assert sim.now == lease.deadline == 175.0
        assert told == [(175.0, error)]
        assert (error.reason, error.key) == ("expired", "db")
        assert str(error) == (
            f"the lease of 'db' (fence {lease.fence}) is lost: not renewed before the deadline"
        )
        assert not lease.live
        assert repr(lease).endswith(": lost (expired)>")
        assert leases.statistics().lost_expired == 1
        with pytest.raises(LeaseLost):
            await lease.renew()
        store.hangs = ""


@in_virtual_time
async def test_a_holder_is_notified_when_the_store_lost_its_lease(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        assert await leases.revoke(lease.id, "db")
        assert not await leases.revoke(lease.id, "db")
        error = await lease.lost()
        assert error is not None
        assert error.reason == "gone"
        assert lease.remaining() == 0.0
        assert sim.now <= 60.0
        await lease.release()
        assert store.calls["release"] == 2  # the two that revoked it, and none for what is lost


@in_virtual_time
async def test_a_manual_renewal_notifies_at_once(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        await leases.revoke(lease.id, "db")
        with pytest.raises(LeaseLost, match="no longer in the store"):
            await lease.renew()
        assert sim.now == 0.0


@in_virtual_time
async def test_a_callback_added_after_the_loss_is_called_at_once(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        store.hangs = "before"
        error = await lease.lost()
        told: list[LeaseLost] = []
        lease.on_lost(told.append)
        assert told == [error]
        assert await lease.lost() is error
        store.hangs = ""


@in_virtual_time
async def test_a_failing_callback_does_not_stop_the_others(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        told = []
        for n in range(3):
            lease = await leases.acquire("db", limit=3)
            assert lease is not None
            lease.on_lost(lambda _: 1 / 0)
            lease.on_lost(lambda _, n=n: told.append(n))  # type: ignore[misc]
        store.hangs = "before"
        assert lease is not None
        await lease.lost()
        assert sorted(told) == [0, 1, 2]
        assert leases.statistics().callback_errors == 3
        store.hangs = ""


@in_virtual_time
async def test_a_released_lease_is_not_lost(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        told: list[LeaseLost] = []
        lease.on_lost(told.append)
        waiting = asyncio.create_task(lease.lost())
        await asyncio.sleep(0)
        await lease.release()
        assert await waiting is None
        await asyncio.sleep(500.0)
        assert told == []


@in_virtual_time
async def test_a_coroutine_function_is_refused_as_a_callback(sim: Sim) -> None:
    async def callback(error: LeaseLost) -> None:
        raise AssertionError

    async with client(ScriptedStore()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        with pytest.raises(TypeError, match="which would not be awaited"):
            lease.on_lost(callback)


@in_virtual_time
async def test_an_expired_lease_is_not_live_before_its_holder_is_notified(sim: Sim) -> None:
    store = ScriptedStore()
    host = sim.host("worker")
    box = []

    async def work() -> None:
        async with client(store) as leases:
            box.append(await leases.acquire("db", limit=1))
            await asyncio.sleep(10_000.0)

    host.start(work())
    await asyncio.sleep(1.0)
    (lease,) = box
    assert lease is not None
    host.pause()
    await asyncio.sleep(lease.remaining() - 0.001)
    assert lease.live
    await asyncio.sleep(0.001)
    assert is_over(lease)
    assert lease.error is None
    assert repr(lease).endswith(": expired>")
    host.resume()
    assert await lease.lost() is not None


# -- lost answers --------------------------------------------------------------------------------


@in_virtual_time
async def test_an_acquire_whose_answer_is_lost_is_undone(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.hangs = "after"
        with pytest.raises(LeaseError, match=r"the store did not answer acquire within 5 s"):
            await leases.acquire("db", limit=1)
        assert len(await _inside(store)) == 1
        assert leases.statistics().in_doubt == 1
        store.hangs = ""
        await asyncio.sleep(5.0)
        assert await _inside(store) == []
        now = leases.statistics()
        assert (now.in_doubt, now.undone) == (0, 1)


@in_virtual_time
async def test_an_acquire_that_arrives_after_its_release_is_undone(sim: Sim) -> None:
    """The network delays the acquire until after the outage, and its release arrives first."""
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.hangs = "before"
        with pytest.raises(LeaseError):
            await leases.acquire("db", limit=1)
        (doubt,) = leases._table._doubts.values()
        store.hangs = ""
        await store.called("release", 2)
        await asyncio.sleep(0)
        await store.acquire(doubt.request)
        assert await leases.acquire("db", limit=1) is None
        await asyncio.sleep(8.0)
        assert await leases.acquire("db", limit=1) is not None
        now = leases.statistics()
        assert (now.in_doubt, now.undone) == (0, 1)


@in_virtual_time
async def test_an_acquire_that_is_cancelled_is_undone(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        store.hangs = "after"
        task = asyncio.create_task(leases.acquire("db", limit=1))
        await asyncio.sleep(1.0)
        store.hangs = ""
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(1.0)
        assert await _inside(store) == []
        assert leases.statistics().undone == 1


@in_virtual_time
async def test_a_release_that_is_not_answered_is_repeated(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        store.hangs = "before"
        await lease.release()
        assert not lease.live
        store.hangs = ""
        await asyncio.sleep(5.0)
        assert await _inside(store) == []


@in_virtual_time
async def test_a_lease_in_doubt_that_cannot_be_settled_is_left_to_expire(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        store.hangs = "after"
        with pytest.raises(LeaseError):
            await leases.acquire("db", limit=1, ttl=30.0)
        store.hangs = "before"
        await asyncio.sleep(100.0)
        store.hangs = ""
        await asyncio.sleep(10.0)
        now = leases.statistics()
        assert (now.in_doubt, now.undone, now.left_to_time) == (0, 0, 1)


# -- for people ----------------------------------------------------------------------------------


@in_virtual_time
async def test_the_holder_is_stored_with_a_lease(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        await leases.acquire("db", limit=1)
        await leases.acquire("db/users", limit=1, owner="importer")
        first, second = await leases.held()
        assert (first.holder.service_name, first.holder.owner) == ("orders", "orders")
        assert second.holder.owner == "importer"
        assert first.holder.pid == os.getpid()
        assert first.holder.host
        assert first.created_at == pytest.approx(sim.loop.clock.wall())


@in_virtual_time
async def test_repr_shows_the_state(sim: Sim) -> None:
    store = ScriptedStore()
    leases = client(store)
    assert repr(leases) == "<Leases the store: new, 0 leases>"
    with pytest.raises(LeaseError, match="is not open: use `async with`"):
        await leases.acquire("db", limit=1)
    async with leases:
        await leases.acquire("db", limit=2)
        assert repr(leases) == "<Leases the store: open, 1 lease>"
        store.break_down()
        await leases.acquire("db", limit=2)
        await asyncio.sleep(12.0)
        assert repr(leases) == "<Leases the store: no answer for 12 s, 2 leases (1 local)>"
        store.error = None
        await asyncio.sleep(5.0)
    assert repr(leases) == "<Leases the store: closed, 0 leases>"


@in_virtual_time
async def test_a_client_can_be_opened_once(sim: Sim) -> None:
    leases = client(ScriptedStore())
    async with leases:
        with pytest.raises(LeaseError, match="was opened before"):
            await leases.open()
    await leases.close()


@in_virtual_time
async def test_a_misconfigured_store_does_not_count_as_an_outage(sim: Sim) -> None:
    store = ScriptedStore()
    store.error = StoreMisconfigured("no such table")
    with pytest.raises(StoreMisconfigured):
        await client(store).open()
    store.error = None
    async with client(store) as leases:
        store.error = StoreMisconfigured("no such table")
        with pytest.raises(StoreMisconfigured):
            await leases.acquire("db", limit=5)
        assert leases.statistics().local_granted == 0
        store.error = None


@in_virtual_time
async def test_a_defective_store_loses_leases_at_their_deadline(sim: Sim) -> None:
    """An error that no adapter should raise does not stop the keeper: holders are notified."""
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        store.error = ZeroDivisionError("a defect")
        error = await lease.lost()
        assert error is not None
        assert sim.now == 175.0
        store.error = None
        await asyncio.sleep(10.0)
        assert await leases.acquire("db", limit=1) is not None
        assert "a defect" in leases.recorder.explain("leases/keeper")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"ttl": 0.0}, "ttl=0.0 must be more than 0 seconds"),
        ({"ttl": float("inf")}, "ttl=inf must be more than 0 seconds, and finite"),
        ({"key": ""}, "key has 0 bytes, and must have 1 to 1024"),
        ({"key": "k" * 1025}, "key has 1025 bytes"),
        ({"key": "a\0b"}, "must not contain a NUL"),
        ({"key": "\ud800"}, "without lone surrogates"),
    ],
)
async def test_mistakes_in_acquire_are_refused(wrong: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"key": "db", "limit": 1, "ttl": 180.0}
    async with client(ScriptedStore()) as leases:
        with pytest.raises(ValueError, match=words):
            await leases.acquire(**{**good, **wrong})  # type: ignore[arg-type]


async def test_a_margin_of_half_the_ttl_is_refused() -> None:
    async with client(ScriptedStore(), margin=10.0) as leases:
        with pytest.raises(ValueError, match="ttl=15 must be more than twice the margin of 10 s"):
            await leases.acquire("db", limit=1, ttl=15.0)


def test_one_error_lists_all_mistakes_in_the_policy() -> None:
    with pytest.raises(ValueError, match="leases: ") as caught:
        Policy(
            on_unavailable="panic",  # type: ignore[arg-type]
            local_limit=-1,
            renew_every=0.0,
            margin=-1.0,
            timeout=float("inf"),
            batch=0,
        )
    for name in ("on_unavailable", "local_limit", "renew_every", "margin", "timeout", "batch"):
        assert f"{name}=" in str(caught.value)


async def test_a_forked_child_has_no_leases() -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        # What a child sees is this same object in a process with another number.
        lease._pid = leases._pid = -1
        assert is_over(lease)
        await lease.release()
        await leases.close()
        with pytest.raises(LeaseError, match="belong to the parent process -1 of this fork"):
            await leases.acquire("db", limit=1)
        lease._pid = leases._pid = os.getpid()
        assert lease.live
        assert store.calls["release"] == 0


async def _inside(store: ScriptedStore) -> list[str]:
    return [known for leases in store._keys.values() for known in leases]


def test_an_outage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        store = ScriptedStore()
        async with client(store) as leases:
            store.break_down()
            await leases.acquire("db", limit=5)
            await asyncio.sleep(10.0)
            store.error = None
            await asyncio.sleep(10.0)

    caplog.set_level(logging.WARNING, "moored.leases")
    scenario()
    assert [record.message for record in caplog.records][:2] == [
        "the store: store unavailable, applying limits within this process only, and refusing "
        "exclusive leases: connection refused (StoreUnavailable)",
        "the store: the store answers again, after 10 s",
    ]


def test_lost_leases_are_logged_once_except_those_of_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(sim: Sim) -> None:
        store = ScriptedStore()
        async with client(store, on_unavailable="refuse") as leases:
            lost = [await leases.acquire("db", limit=3) for _ in range(3)]
            assert lost[0] is not None
            await lost[0].renew()  # nothing is lost, nothing is logged
            store.break_down()
            await lost[0].lost()
            store.error = None
            await asyncio.sleep(10.0)
            assert await leases.acquire("db", limit=3) is not None, "it ends with the client"

    caplog.set_level(logging.WARNING, "moored.leases")
    run_one(scenario, 1).result()
    told = [record.message for record in caplog.records if " lost " in record.message]
    assert told == ["the store: 3 leases lost (3 of 'db'): not renewed before the deadline"]


def test_a_client_may_be_created_outside_a_loop() -> None:
    leases = Leases(ScriptedStore())

    async def use() -> None:
        async with leases:
            assert await leases.acquire("db", limit=1) is not None

    asyncio.run(use())


def cancel_the_keeper(store: ScriptedStore) -> None:
    [keeper] = [task for task in asyncio.all_tasks() if task.get_name().endswith("/keeper")]
    keeper.cancel()


def cancel_its_call(store: ScriptedStore) -> None:
    """A driver gives up a call by itself: its future is cancelled, not the keeper."""
    store.error = asyncio.CancelledError()  # type: ignore[assignment]
    asyncio.get_running_loop().call_later(60.5, setattr, store, "error", None)


@pytest.mark.parametrize("cancel", [cancel_the_keeper, cancel_its_call])
def test_a_lease_survives_a_keeper_that_was_cancelled(
    cancel: Callable[[ScriptedStore], None],
) -> None:
    """Also when the task that opened the client has ended, as in the facade for threads."""

    async def scenario(sim: Sim) -> None:
        store = ScriptedStore()
        leases = client(store)
        await asyncio.create_task(leases.open())
        lease = await leases.acquire("db", limit=1, ttl=180.0)
        assert lease is not None
        cancel(store)
        await asyncio.sleep(600)
        assert lease.live
        assert [held.id for held in await leases.held("db")] == [lease.id]
        await leases.close()

    for seed in range(3):
        run_one(scenario, seed)


async def test_a_refused_acquire_yields_to_the_event_loop() -> None:
    async with connect("memory://") as leases:
        assert await leases.acquire("db", limit=1) is not None
        turn = asyncio.create_task(asyncio.sleep(0))
        for _ in range(3):
            assert await leases.acquire("db", limit=1) is None
        assert turn.done()
