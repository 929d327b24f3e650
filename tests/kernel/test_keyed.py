"""Keyed workers: order within a key, independent keys, an outcome for every item, no leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.kernel import (
    KeyedStatistics,
    KeyedWorkError,
    KeyedWorkers,
    QueueFull,
    WaitTimeout,
    WorkCancelled,
    WorkerCrashed,
)

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]

Outcome = Callable[[], str]


class Desk:
    """A handler that waits until the test lets it finish each item."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.words: defaultdict[str, asyncio.Future[Outcome]] = defaultdict(
            asyncio.get_running_loop().create_future
        )
        self.reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, key: str, item: str) -> str:
        self.log.append(f"+{item}")
        self.reached[item].set()
        try:
            return (await self.words[item])()
        finally:
            self.log.append(f"-{item}")

    def finish(self, *items: str) -> None:
        for item in items:
            self.words[item].set_result(lambda item=item: item.upper())  # type: ignore[misc]

    def fail(self, item: str, error: BaseException) -> None:
        def outcome() -> str:
            raise error

        self.words[item].set_result(outcome)


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
async def workers(desk: Desk) -> KeyedWorkers[str, str, str]:
    return KeyedWorkers(desk, name="desk")


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


def accounted(statistics: KeyedStatistics) -> int:
    return sum(statistics[4:])


async def test_the_items_of_a_key_are_done_in_order(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    desk.finish("a", "b", "c")
    futures = [workers.submit("k", item) for item in "abc"]
    assert await asyncio.gather(*futures) == ["A", "B", "C"]
    assert desk.log == ["+a", "-a", "+b", "-b", "+c", "-c"]


async def test_keys_do_not_wait_for_each_other(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    slow = workers.submit("slow", "a")
    desk.finish("b")
    assert await workers.run("quick", "b") == "B"
    assert not slow.done()
    desk.finish("a")
    assert await slow == "A"


async def test_nothing_is_kept_for_a_key_without_work() -> None:
    async def handler(key: Key, item: Key) -> Key:
        return item

    class Key:
        pass

    workers: KeyedWorkers[Key, Key, Key] = KeyedWorkers(handler)
    watch = weakref.WeakSet[Key]()
    for _ in range(3):
        keys = [Key() for _ in range(100)]
        watch.update(keys)
        await asyncio.gather(*(workers.submit(key, key) for key in keys for _ in range(2)))
    assert len(workers) == 0
    assert sys.getsizeof(workers._pumps) == sys.getsizeof({})
    del keys
    await turns()
    gc.collect()
    assert len(watch) == 0


async def test_a_key_is_idle_in_the_step_of_its_last_result() -> None:
    seen: list[int] = []

    async def handler(key: str, item: int) -> None:
        pass

    workers: KeyedWorkers[str, int, None] = KeyedWorkers(handler)
    workers.submit("k", 1).add_done_callback(lambda _: seen.append(len(workers)))
    await workers.drain()
    assert seen == [0]


async def test_a_failed_item_fails_those_behind_it_and_no_other_key(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    first, *behind = [workers.submit("k", item) for item in "abc"]
    other = workers.submit("other", "x")
    error = ConnectionResetError("peer reset")
    desk.fail("a", error)
    with pytest.raises(ConnectionResetError):
        await first
    for future in behind:
        with pytest.raises(WorkerCrashed) as caught:
            await future
        assert caught.value.__cause__ is error
        assert "desk: an earlier item of 'k' failed: peer reset" in str(caught.value)
    assert "+b" not in desk.log
    desk.finish("x", "d")
    assert await other == "X"
    assert await workers.run("k", "d") == "D"
    assert workers.statistics() == KeyedStatistics(
        keys=0,
        queued=0,
        submitted=5,
        rejected=0,
        completed=2,
        failed=1,
        crashed=2,
        cancelled=0,
        skipped=0,
    )


async def test_an_item_that_its_caller_cancelled_behind_a_crash_counts_as_skipped(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    futures = [workers.submit("k", item) for item in "abc"]
    await turns()
    futures[1].cancel()
    desk.fail("a", ValueError("no"))
    await asyncio.gather(*futures, return_exceptions=True)
    now = workers.statistics()
    assert (now.failed, now.crashed, now.skipped, now.cancelled) == (1, 1, 1, 0)


async def test_an_item_that_its_caller_cancelled_before_cancel_counts_as_skipped(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    futures = [workers.submit("k", item) for item in "abc"]
    await turns()
    futures[1].cancel()
    assert workers.cancel("k") == 2
    await asyncio.gather(*futures, return_exceptions=True)
    now = workers.statistics()
    assert (now.failed, now.crashed, now.skipped, now.cancelled) == (0, 0, 1, 2)


async def test_items_behind_a_failed_one_each_have_their_own_error(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    futures = [workers.submit("k", item) for item in "abc"]
    desk.fail("a", ValueError("no"))
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert len({id(outcome) for outcome in outcomes}) == 3


async def test_a_full_queue_is_refused_with_numbers(desk: Desk) -> None:
    workers = KeyedWorkers(desk, max_queue=2, name="desk")
    futures = [workers.submit("k", item) for item in "abc"]
    with pytest.raises(QueueFull, match=r"desk: 'k' has 2 items waiting .*\(max_queue=2\)"):
        workers.submit("k", "d")
    other = workers.submit("other", "x")
    desk.finish("a", "b", "c", "x")
    assert await asyncio.gather(*futures, other) == ["A", "B", "C", "X"]
    assert workers.statistics().rejected == 1
    assert workers.statistics().submitted == 4


async def test_an_item_cancelled_by_its_caller_while_it_waits_is_skipped(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    first, second, third = [workers.submit("k", item) for item in "abc"]
    second.cancel()
    desk.finish("a", "c")
    assert await first == "A"
    assert await third == "C"
    assert desk.log == ["+a", "-a", "+c", "-c"]
    assert workers.statistics().skipped == 1


async def test_the_first_item_cancelled_before_it_starts_is_skipped(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    first, second = workers.submit("k", "a"), workers.submit("k", "b")
    first.cancel()
    desk.finish("b")
    assert await second == "B"
    assert desk.log == ["+b", "-b"]


async def test_a_running_item_continues_when_its_caller_cancels_the_future(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    caller = asyncio.create_task(workers.run("k", "a"))
    await desk.reached["a"].wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(workers) == 1
    desk.finish("a")
    await workers.drain()
    assert desk.log == ["+a", "-a"]
    assert workers.statistics().completed == 1


@pytest.mark.parametrize("leaves", [False, True])
async def test_an_unread_failure_is_counted_and_not_logged_as_never_retrieved(
    desk: Desk,
    workers: KeyedWorkers[str, str, str],
    complaints: list[dict[str, Any]],
    leaves: bool,
) -> None:
    first = workers.submit("k", "a")
    workers.submit("k", "b")
    await desk.reached["a"].wait()
    if leaves:
        first.cancel()
    del first
    desk.fail("a", ValueError("unread"))
    await workers.drain()
    await turns()
    gc.collect()
    assert complaints == []
    assert workers.statistics().failed == 1
    assert workers.statistics().crashed == 1


async def test_cancel_ends_the_work_of_one_key(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    running, waiting = workers.submit("k", "a"), workers.submit("k", "b")
    other = workers.submit("other", "x")
    await desk.reached["x"].wait()
    assert workers.cancel("k") == 2
    with pytest.raises(WorkCancelled, match=r"'k' was cancelled before it was started"):
        await waiting
    with pytest.raises(WorkCancelled, match=r"'k' was cancelled while it ran"):
        await running
    desk.finish("x")
    assert await other == "X"
    assert workers.cancel("nobody") == 0
    assert workers.statistics().cancelled == 2


async def test_work_submitted_after_a_cancel_waits_for_the_cancelled_handler() -> None:
    tidy, entered = asyncio.Event(), asyncio.Event()
    running = most = 0

    async def handler(key: str, item: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if item == "stuck":
                entered.set()
                await asyncio.Event().wait()
            return item
        except asyncio.CancelledError:
            await tidy.wait()
            raise
        finally:
            running -= 1

    workers: KeyedWorkers[str, str, str] = KeyedWorkers(handler)
    stuck = workers.submit("k", "stuck")
    await entered.wait()
    workers.cancel()
    later = workers.submit("k", "later")
    await turns()
    assert not stuck.done()
    assert not later.done()
    assert workers.cancel("k") == 2
    last = workers.submit("k", "last")
    tidy.set()
    assert await last == "last"
    with pytest.raises(WorkCancelled):
        await stuck
    with pytest.raises(WorkCancelled):
        await later
    assert most == 1


async def test_cancel_before_the_first_step(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    futures = [workers.submit("k", item) for item in "ab"]
    assert workers.cancel() == 2
    assert workers.cancel() == 0
    again = workers.submit("k", "c")
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkCancelled, WorkCancelled]
    desk.finish("c")
    assert await again == "C"
    assert desk.log == ["+c", "-c"]
    assert accounted(workers.statistics()) == 3


async def test_a_handler_that_cancels_its_own_key_does_not_hit_the_next_item() -> None:
    async def handler(key: str, item: str) -> str:
        if item == "a":
            workers.cancel(key)
            workers.submit(key, "b").add_done_callback(done.append)
            return "ended without waiting"
        await asyncio.sleep(0)
        return item

    done: list[asyncio.Future[str]] = []
    workers: KeyedWorkers[str, str, str] = KeyedWorkers(handler)
    assert await workers.run("k", "a") == "ended without waiting"
    await workers.drain()
    assert [future.result() for future in done] == ["b"]


async def test_a_handler_that_ignores_the_cancellation_has_its_result() -> None:
    entered = asyncio.Event()

    async def handler(key: str, item: str) -> str:
        entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return item

    workers: KeyedWorkers[str, str, str] = KeyedWorkers(handler)
    stubborn = workers.submit("k", "a")
    await entered.wait()
    workers.cancel()
    assert await stubborn == "a"
    await workers.drain()
    assert workers.statistics().completed == 1


async def test_a_handler_that_raises_cancelled_error_settles_every_item() -> None:
    async def handler(key: str, item: str) -> str:
        raise asyncio.CancelledError

    workers: KeyedWorkers[str, str, str] = KeyedWorkers(handler)
    outcomes = await asyncio.gather(
        *(workers.submit("k", item) for item in "abc"), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [WorkCancelled] * 3
    assert len(workers) == 0
    assert workers.statistics().cancelled == 3


@pytest.mark.parametrize("started", [False, True])
async def test_pumps_cancelled_by_other_code_fail_their_items(
    desk: Desk, workers: KeyedWorkers[str, str, str], started: bool
) -> None:
    futures = [workers.submit("k", item) for item in "abc"]
    if started:
        await desk.reached["a"].wait()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkCancelled] * 3
    assert len(workers) == 0
    desk.finish("d")
    assert await workers.run("k", "d") == "D"
    assert accounted(workers.statistics()) == 4


async def test_a_pump_cancelled_by_cancel_and_by_other_code_ends(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    first = workers.submit("k", "a")
    await desk.reached["a"].wait()
    workers.cancel("k")
    workers._pumps["k"].task.cancel()
    second = workers.submit("k", "b")
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkCancelled, WorkCancelled]
    assert len(workers) == 0


def test_a_keyboard_interrupt_propagates_and_settles_every_item() -> None:
    async def handler(key: str, item: int) -> None:
        raise KeyboardInterrupt

    futures: list[asyncio.Future[None]] = []
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: complaints.append(each))
        workers: KeyedWorkers[str, int, None] = KeyedWorkers(handler)
        futures.extend(workers.submit("k", number) for number in range(2))
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert isinstance(futures[0].exception(), KeyboardInterrupt)
    assert isinstance(futures[1].exception(), WorkerCrashed)
    futures.clear()
    gc.collect()
    assert complaints == []


async def test_drain_waits_until_nothing_is_left(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    await workers.drain()
    futures = [workers.submit(item, item) for item in "abc"]
    draining = [asyncio.create_task(workers.drain()) for _ in range(2)]
    desk.finish("a", "b")
    await asyncio.gather(*futures[:2])
    await turns()
    assert not any(each.done() for each in draining)
    desk.finish("c")
    await asyncio.gather(*draining)
    assert all(future.done() for future in futures)


async def test_a_drain_that_times_out_counts_the_remaining_work(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    for item in "abc":
        workers.submit("k", item)
    with pytest.raises(WaitTimeout, match=r"desk still has 1 key at work and 2 items waiting"):
        await workers.drain(0.001)
    assert workers._drained == []
    workers.cancel()
    await workers.drain()


async def test_close_refuses_new_work_and_waits_for_the_old(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    future = workers.submit("k", "a")
    closing = asyncio.create_task(workers.close())
    await turns()
    with pytest.raises(KeyedWorkError, match="desk is closed"):
        workers.submit("k", "b")
    desk.finish("a")
    await closing
    assert future.result() == "A"


async def test_close_cancels_the_remaining_work_after_its_timeout(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    future = workers.submit("k", "a")
    await workers.close(timeout=0.001)
    assert isinstance(future.exception(), WorkCancelled)
    assert desk.log == ["+a", "-a"]


async def test_a_cancelled_close_cancels_the_work(
    desk: Desk, workers: KeyedWorkers[str, str, str]
) -> None:
    future = workers.submit("k", "a")
    closing = asyncio.create_task(workers.close())
    await desk.reached["a"].wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(WorkCancelled):
        await future


async def test_leaving_the_context_closes(desk: Desk) -> None:
    desk.finish("a")
    async with KeyedWorkers(desk) as workers:
        future = workers.submit("k", "a")
    assert future.result() == "A"


async def test_a_context_left_by_an_error_does_not_wait(desk: Desk) -> None:
    workers = KeyedWorkers(desk)
    futures = []

    async def use() -> None:
        async with workers:
            futures.append(workers.submit("k", "a"))
            raise LookupError

    with pytest.raises(LookupError):
        await use()
    assert isinstance(futures[0].exception(), WorkCancelled)


async def test_the_repr_shows_the_state(desk: Desk, workers: KeyedWorkers[str, str, str]) -> None:
    for item in "abc":
        workers.submit("k", item)
    await desk.reached["a"].wait()
    assert repr(workers) == "<KeyedWorkers desk: 1 key at work, 2 waiting, 0 done, 0 failed>"
    assert [task.get_name() for task in asyncio.all_tasks()].count("desk 'k'") == 1
    await workers.close(0)
    assert "desk: closed, 0 keys" in repr(workers)
    assert workers


def test_max_queue_must_be_at_least_1() -> None:
    async def handler(key: str, item: str) -> None: ...

    with pytest.raises(ValueError, match="max_queue=0 must be at least 1"):
        KeyedWorkers(handler, max_queue=0)


def test_submit_without_a_running_loop_raises() -> None:
    async def handler(key: str, item: str) -> None: ...

    workers: KeyedWorkers[str, str, None] = KeyedWorkers(handler)
    with pytest.raises(RuntimeError, match="no running event loop"):
        workers.submit("k", "a")
    assert len(workers) == 0


Work = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.booleans()), max_size=60)


@settings(deadline=None, max_examples=50)
@given(work=Work)
def test_each_key_keeps_its_order_whatever_the_work(work: list[tuple[str, int, bool]]) -> None:
    done: defaultdict[str, list[int]] = defaultdict(list)
    busy: set[str] = set()

    async def handler(key: str, item: tuple[int, int]) -> int:
        number, waits = item
        assert key not in busy
        busy.add(key)
        await turns(waits)
        busy.remove(key)
        done[key].append(number)
        return number

    async def main() -> list[int]:
        workers: KeyedWorkers[str, tuple[int, int], int] = KeyedWorkers(handler)
        futures = []
        for number, (key, waits, pause) in enumerate(work):
            futures.append(workers.submit(key, (number, waits)))
            await turns(1 if pause else 0)
        return list(await asyncio.gather(*futures))

    assert asyncio.run(main()) == list(range(len(work)))
    for key in "abcd":
        assert done[key] == [number for number, each in enumerate(work) if each[0] == key]
