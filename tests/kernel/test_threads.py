"""Blocking calls in threads of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from moored.kernel import in_thread, start_thread

pytestmark = pytest.mark.every_loop


async def test_a_result_comes_from_another_thread() -> None:
    name, daemon = await in_thread(
        lambda: (threading.current_thread().name, threading.current_thread().daemon), name="helper"
    )
    assert (name, daemon) == ("helper", True)


async def test_an_error_is_raised_where_it_is_awaited() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError, match="no"):
        await in_thread(fail, name="helper")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_a_base_exception_is_raised_where_it_is_awaited(
    error: BaseException,
) -> None:
    def fail() -> None:
        raise error

    outcome = in_thread(fail, name="helper")
    await asyncio.wait([outcome])
    assert outcome.exception() is error


async def test_a_stop_iteration_is_raised_as_a_runtime_error() -> None:
    """A future cannot raise StopIteration: without this, its waiter would wait for ever."""
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        async with asyncio.timeout(10.0):
            await in_thread(iter([]).__next__, name="helper")
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_the_loop_is_not_blocked_by_the_call() -> None:
    may_end = threading.Event()
    outcome = in_thread(lambda: may_end.wait(30.0), name="helper")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not outcome.done()
    may_end.set()
    assert await outcome is True


async def test_a_result_after_a_cancellation_is_passed_to_unwanted() -> None:
    may_end = threading.Event()
    loop = asyncio.get_running_loop()
    unwanted: asyncio.Future[tuple[str, int]] = loop.create_future()

    def call() -> str:
        assert may_end.wait(30.0)
        return "a connection"

    def clear(result: str) -> None:
        unwanted.set_result((result, threading.get_ident()))

    outcome = in_thread(call, name="helper", unwanted=clear)
    outcome.cancel()
    may_end.set()
    async with asyncio.timeout(30.0):
        assert await unwanted == ("a connection", threading.get_ident())


async def test_an_awaited_result_is_not_passed_to_unwanted() -> None:
    unwanted: list[int] = []
    assert await in_thread(lambda: 5, name="helper", unwanted=unwanted.append) == 5
    await asyncio.sleep(0)
    assert unwanted == []


async def test_a_result_after_a_cancellation_without_unwanted_is_ignored() -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    may_end = threading.Event()
    outcome = in_thread(lambda: may_end.wait(30.0), name="helper")
    outcome.cancel()
    may_end.set()
    # The results of two threads that end one after the other arrive in that order.
    assert await in_thread(lambda: joined("helper"), name="other")
    assert complaints == []


def joined(name: str) -> bool:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30.0)
    return True


async def test_an_error_after_a_cancellation_is_not_passed_to_unwanted() -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    may_end, ended = threading.Event(), threading.Event()
    unwanted: list[Any] = []

    def call() -> None:
        assert may_end.wait(30.0)
        ended.set()
        raise ZeroDivisionError

    outcome = in_thread(call, name="helper", unwanted=unwanted.append)
    outcome.cancel()
    may_end.set()
    await asyncio.to_thread(ended.wait, 30.0)
    assert await in_thread(lambda: joined("helper"), name="other")
    assert complaints == []
    assert unwanted == []


def test_a_result_after_the_end_of_the_loop_is_passed_to_unwanted() -> None:
    may_end, cleared = threading.Event(), threading.Event()
    unwanted: list[str] = []

    def call() -> str:
        assert may_end.wait(30.0)
        return "a connection"

    def clear(result: str) -> None:
        unwanted.append(result)
        cleared.set()

    async def begin() -> None:
        in_thread(call, name="helper", unwanted=clear)

    asyncio.run(begin())
    may_end.set()
    assert cleared.wait(30.0)
    assert unwanted == ["a connection"]


def test_a_thread_can_wait_for_the_result() -> None:
    assert start_thread(lambda: threading.current_thread().name, name="helper").result(30.0) == (
        "helper"
    )


def test_an_error_is_raised_in_the_waiting_thread() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no")

    assert isinstance(start_thread(fail, name="helper").exception(30.0), ZeroDivisionError)
    outcome = start_thread(iter(()).__next__, name="helper")
    assert isinstance(outcome.exception(30.0), RuntimeError)


def test_a_started_call_cannot_be_cancelled() -> None:
    may_end = threading.Event()
    outcome = start_thread(lambda: may_end.wait(30.0), name="helper")
    assert not outcome.cancel()
    may_end.set()
    assert outcome.result(30.0)


PROGRAM = """
import asyncio, threading
from moored.kernel import in_thread

async def main():
    in_thread(threading.Event().wait, name="stuck")
    print("ready", flush=True)

asyncio.run(main())
"""


def test_a_thread_that_is_stuck_does_not_keep_the_program_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
