"""Background tasks that are referenced, drained and cancelled together."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from moored.kernel import Tasks, awaited, is_cancelled, raise_if_cancelled

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


async def test_a_task_is_held_until_it_ends_and_not_longer() -> None:
    tasks, go, done = Tasks(), asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        done.append(True)

    tasks.start(work(), name="work")
    gc.collect()
    await asyncio.sleep(0)
    assert repr(tasks) == "<Tasks: 1 running: work>"
    go.set()
    await tasks.drain()
    assert done == [True]
    assert len(tasks) == 0
    assert list(tasks) == []


async def test_drain_waits_for_tasks_that_tasks_start() -> None:
    tasks, done = Tasks(), []

    async def work(depth: int) -> None:
        await asyncio.sleep(0)
        if depth:
            tasks.start(work(depth - 1))
        done.append(depth)

    tasks.start(work(3))
    await tasks.drain()
    assert done == [3, 2, 1, 0]


async def test_cancel_waits_for_the_clean_up_of_every_task() -> None:
    tasks, cleaned = Tasks(), []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)

    for number in range(3):
        tasks.start(work(number))
    await asyncio.sleep(0)
    await tasks.cancel()
    assert cleaned == [0, 1, 2]
    assert len(tasks) == 0


async def test_an_exception_of_a_task_that_is_not_awaited_goes_to_the_loops_handler() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    tasks = Tasks()

    async def work() -> None:
        raise ValueError("wrong")

    tasks.start(work())
    await tasks.drain()
    gc.collect()
    assert [str(context["exception"]) for context in reported] == ["wrong"]


async def test_awaited_takes_plain_and_async_results() -> None:
    async def answer() -> int:
        return 7

    assert await awaited(7) == 7
    assert await awaited(answer()) == 7
    assert await awaited(asyncio.ensure_future(answer())) == 7


async def test_a_loop_ends_when_an_error_of_a_statement_replaces_its_cancellation() -> None:
    lost = ConnectionError("lost")

    async def statement() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise lost from None  # as psycopg does

    async def poll() -> None:
        while True:
            try:
                await statement()
            except ConnectionError as error:
                raise_if_cancelled(error)

    task = asyncio.ensure_future(poll())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.value.__cause__ is lost


async def test_a_task_is_not_cancelled_by_the_end_of_what_it_awaits() -> None:
    other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    assert not is_cancelled()
    raise_if_cancelled(ConnectionError())  # it does nothing


async def test_a_timeout_that_has_passed_does_not_leave_its_task_cancelled() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    assert not is_cancelled()
