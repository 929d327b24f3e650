"""Exclusive leases as blocks, in virtual time."""

# ruff: noqa: PT012 (what raises is the end of a block, so there must be one)

from __future__ import annotations

import asyncio

import pytest
from tests.leases.virtual import ScriptedStore, client, in_virtual_time

from moored.leases import LeaseLost, LeaseRefused, StoreUnavailable
from moored.testing import Sim

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.pure]


@in_virtual_time
async def test_there_is_one_owner_and_its_fence_grows(sim: Sim) -> None:
    store = ScriptedStore()
    inside = 0
    fences = []

    async def worker() -> None:
        nonlocal inside
        async with client(store) as leases, leases.exclusive("report") as lease:
            inside += 1
            assert inside == 1
            fences.append(lease.fence)
            await asyncio.sleep(1.0)
            inside -= 1

    await asyncio.gather(*(worker() for _ in range(5)))
    assert fences == sorted(set(fences))


@in_virtual_time
async def test_a_refusal_after_the_wait_names_the_holder(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as first, client(store) as second:
        async with first.exclusive("report", owner="night shift"):
            await asyncio.sleep(41.0)
            with pytest.raises(LeaseRefused) as caught:
                async with second.exclusive("report", wait=5.0):
                    raise AssertionError
            assert sim.now == pytest.approx(46.0)
            text = str(caught.value)
            assert text.startswith(
                "no lease of 'report' within 5 s: held by night shift of orders (host "
            )
            assert "for 46 s); it expires in " in text
            with pytest.raises(LeaseRefused, match="no lease of 'report': held by night shift"):
                async with second.exclusive("report", wait=0.0):
                    raise AssertionError
        async with second.exclusive("report", wait=0.0):
            pass


@in_virtual_time
async def test_a_refusal_works_while_the_holder_cannot_be_read(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as first, client(store) as second, first.exclusive("report"):
        task = asyncio.create_task(second.exclusive("report", wait=1.0).acquire())
        while not store.calls["held"] and not task.done():
            await asyncio.sleep(0)
            if sim.now >= 1.0:
                store.break_down()
            await asyncio.sleep(0.01)
        with pytest.raises((LeaseRefused, StoreUnavailable)):
            await task
        store.error = None


@in_virtual_time
async def test_a_waiter_gets_the_lease_soon_after_its_release(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as first, client(store) as second:
        lease = await first.exclusive("report").acquire()
        waiting = asyncio.create_task(second.exclusive("report").acquire())
        await asyncio.sleep(100.0)
        await lease.release()
        await waiting
        assert sim.now <= 100.0 + 1.3


@in_virtual_time
async def test_a_lost_lease_cancels_the_block(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        with pytest.raises(LeaseLost) as caught:
            async with leases.exclusive("report") as lease:
                store.hangs = "before"
                await asyncio.sleep(10_000.0)
        assert sim.now == lease.deadline == 175.0
        assert caught.value is lease.error
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        store.hangs = ""
        # And nothing of the cancellation is left for later.
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_without_cancel_a_lost_lease_is_raised_at_the_end_of_the_block(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        with pytest.raises(LeaseLost):
            async with leases.exclusive("report", cancel=False) as lease:
                store.hangs = "before"
                await asyncio.sleep(1000.0)
                assert not lease.live
        assert sim.now == 1000.0
        store.hangs = ""


@in_virtual_time
async def test_a_loss_found_by_renew_is_raised_from_the_block(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        with pytest.raises(LeaseLost, match="no longer in the store"):
            async with leases.exclusive("report") as lease:
                await leases.revoke(lease.id, "report")
                await lease.renew()
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_a_block_that_ends_together_with_its_lease_raises_lease_lost(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        with pytest.raises(LeaseLost):
            async with leases.exclusive("report") as lease:
                await leases.revoke(lease.id, "report")
                with pytest.raises(LeaseLost):
                    await lease.renew()
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_an_exception_of_the_block_takes_precedence_over_the_loss(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        with pytest.raises(ZeroDivisionError):
            async with leases.exclusive("report") as lease:
                await leases.revoke(lease.id, "report")
                try:
                    await lease.renew()
                except LeaseLost:
                    raise ZeroDivisionError from None
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_a_cancellation_by_another_task_propagates(sim: Sim) -> None:
    store = ScriptedStore()

    async def work() -> None:
        async with client(store) as leases, leases.exclusive("report"):
            await asyncio.sleep(10_000.0)

    task = asyncio.create_task(work())
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(await store.held()) == []


@in_virtual_time
async def test_a_loss_together_with_a_cancellation_is_a_cancellation(sim: Sim) -> None:
    store = ScriptedStore()

    async def work() -> None:
        async with client(store) as leases, leases.exclusive("report") as lease:
            lease.on_lost(lambda _: task.cancel())
            store.hangs = "before"
            await asyncio.sleep(10_000.0)

    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert task.cancelled()
    store.hangs = ""


@in_virtual_time
async def test_mistakes(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        with pytest.raises(ValueError, match="wait=-1 must be at least 0 seconds"):
            leases.exclusive("report", wait=-1)
        block = leases.exclusive("report")
        async with block:
            pass
        with pytest.raises(RuntimeError, match="entered before"):
            await block.__aenter__()
