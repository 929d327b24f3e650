"""Registered keys are unique, freed when their owner ends, monitored once, and never leaked."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from moored.kernel import (
    AlreadyRegistered,
    Child,
    Context,
    Down,
    NotRegistered,
    Registry,
    Supervisor,
)
from moored.testing import run_one, scaled

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


async def test_a_key_has_one_owner_and_the_error_carries_the_current_value() -> None:
    registry: Registry[str, object] = Registry("profiles")
    first = object()
    registry.register("alice", first)
    with pytest.raises(AlreadyRegistered, match="'alice' is already registered") as caught:
        registry.register("alice", object())
    assert caught.value.current is first
    assert registry.whereis("alice") is first
    assert repr(registry) == "<Registry profiles: 1 registered, 0 awaited>"


async def test_a_key_is_freed_when_its_owning_task_ends() -> None:
    registry: Registry[str, int] = Registry()

    async def owner() -> None:
        registry.register("k", 1)

    await asyncio.create_task(owner())
    await asyncio.sleep(0)
    assert "k" not in registry


async def test_a_given_owner_keeps_the_key() -> None:
    registry: Registry[str, int] = Registry()
    release = asyncio.Event()
    task = asyncio.create_task(release.wait())
    registry.register("k", 1, owner=task)
    assert registry.items() == [("k", 1)]
    release.set()
    await task
    await asyncio.sleep(0)
    assert len(registry) == 0


async def test_an_owner_that_has_ended_is_refused() -> None:
    registry: Registry[str, int] = Registry()
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    with pytest.raises(RuntimeError, match="cannot be an owner"):
        registry.register("k", 1, owner=task)
    assert "k" not in registry


async def test_unregister_is_harmless_twice_and_never_frees_a_successor() -> None:
    registry: Registry[str, int] = Registry()
    first = registry.register("k", 1)
    first.unregister()
    second = registry.register("k", 2)
    first.unregister()
    registry.unregister("nobody")
    assert registry.whereis("k") == 2
    assert repr(second) == "<Registration 'k' live>"
    assert repr(first) == "<Registration 'k' ended>"
    registry.unregister("k")
    assert list(registry) == []


@pytest.mark.parametrize(
    ("how", "reason"), [("return", "normal"), ("cancel", "shutdown"), ("raise", None)]
)
async def test_a_monitor_gives_exactly_one_down_with_the_reason(
    how: str, reason: str | None
) -> None:
    registry: Registry[str, int] = Registry()
    go = asyncio.Event()
    failure = ValueError("broke")

    async def owner() -> None:
        registry.register("k", 1)
        await go.wait()
        if how == "raise":
            raise failure

    task = asyncio.create_task(owner())
    await asyncio.sleep(0)
    downs = [registry.monitor("k") for _ in range(3)]
    abandoned = registry.monitor("k")
    abandoned.cancel()
    if how == "cancel":
        task.cancel()
    go.set()
    expected = Down("k", failure if reason is None else reason)
    assert await asyncio.gather(*downs) == [expected] * 3
    await asyncio.gather(task, return_exceptions=True)
    assert await registry.monitor("k") == Down("k", "unknown")


async def test_a_monitor_reports_that_a_key_was_unregistered() -> None:
    registry: Registry[str, int] = Registry()
    registration = registry.register("k", 1)
    down = registry.monitor("k")
    registration.unregister()
    assert await down == Down("k", "unregistered")


async def test_waiting_for_a_key_that_has_an_owner_does_not_wait() -> None:
    registry: Registry[str, int] = Registry()
    registry.register("k", 1)
    async with asyncio.timeout(10):
        assert await registry.wait_for("k") == 1
        assert await registry.via("k").wait(timeout=None) == 1


async def test_a_cancelled_waiter_does_not_affect_the_others() -> None:
    registry: Registry[str, int] = Registry()
    waiters = [asyncio.create_task(registry.wait_for("k")) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[1].cancel()
    await asyncio.wait([waiters[1]])
    registry.register("k", 5)
    async with asyncio.timeout(10):
        assert [await waiters[0], await waiters[2]] == [5, 5]
    assert len(registry._arrivals) == 0


async def test_only_a_task_can_own_a_key() -> None:
    registry: Registry[str, int] = Registry()
    outcome: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def callback() -> None:
        try:
            registry.register("k", 1)
        except RuntimeError as error:
            outcome.set_result(error)

    asyncio.get_running_loop().call_soon(callback)
    async with asyncio.timeout(10):
        assert "no task is running that could be the owner" in str(await outcome)
    assert "k" not in registry
    registry.register("k", 1, owner=asyncio.current_task())
    assert "k" in registry


def test_via_survives_restarts_of_the_owner() -> None:
    async def scenario(sim: object) -> None:
        registry: Registry[str, int] = Registry()
        via = registry.via("link")
        with pytest.raises(NotRegistered, match="wait for it with Via"):
            via.resolve()
        with pytest.raises(NotRegistered):
            await via.wait(timeout=2)
        assert repr(via) == "<Via 'link' not registered now>"
        assert len(registry._arrivals) == 0

        async def link(ctx: Context) -> None:
            await asyncio.sleep(1)
            ctx.register(registry, "link", ctx.generation)
            ctx.started()
            await asyncio.sleep(1)
            raise ConnectionResetError

        async with Supervisor(children=[Child("link", link)], intensity=None):
            assert via.resolve() == 1
            down = await registry.monitor("link")
            assert isinstance(down.reason, ConnectionResetError)
            assert await via.wait(timeout=5) == 2
            assert via == registry.via("link")
            assert len({via, registry.via("link")}) == 1

    for seed in range(20):
        run_one(scenario, seed)


def test_the_key_is_free_before_the_next_start_in_every_schedule() -> None:
    async def scenario(sim: object) -> None:
        registry: Registry[str, int] = Registry()

        async def owner(ctx: Context) -> None:
            registry.register("k", ctx.generation)  # AlreadyRegistered here would be the defect
            ctx.started()
            await asyncio.sleep(0)
            raise ValueError

        async with Supervisor(children=[Child("owner", owner)], intensity=None) as root:
            await asyncio.sleep(0)
            for _ in range(200):
                await asyncio.sleep(0)
        failures = [node.last_failure for _, node in root.tree().paths()]
        assert not any("registered" in (failure or "") for failure in failures)

    for seed in range(scaled(200, least=4)):
        run_one(scenario, seed)


async def test_keys_do_not_leak() -> None:
    """A million cycles at full scale keep memory flat: the second half adds nothing."""
    # asyncio's remarks on a busy loop are kept by the log capture: that memory is not ours.
    asyncio.get_running_loop().slow_callback_duration = 60
    registry: Registry[int, int] = Registry()
    levels = []
    tracemalloc.start()
    try:
        for _ in range(2):
            await _register_and_unregister(registry, scaled(500_000))
            gc.collect()
            levels.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert levels[1] - levels[0] < 10_000
    assert len(registry) == 0


async def _register_and_unregister(registry: Registry[int, int], cycles: int) -> None:
    for key in range(cycles):
        registration = registry.register(key, key)
        if key % 100 == 0:
            registry.monitor(key).cancel()
        registration.unregister()
        if key % 1000 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
