"""Callbacks, plain or async, whose caller is cancelled before the result."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings

import pytest

from moored.kernel import run_callback

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_coroutine_returned_after_the_caller_was_cancelled_is_closed(at_once: bool) -> None:
    began, may_end, made = threading.Event(), threading.Event(), list[object]()

    async def open_later() -> None:
        raise AssertionError("it is never begun")

    def factory() -> object:
        began.set()
        may_end.wait(30)
        made.append(open_later())
        return made.pop()

    running = asyncio.create_task(run_callback(factory))
    await asyncio.to_thread(began.wait, 30)
    threads = [each for each in threading.enumerate() if each.name == "moored-callback"]
    if at_once:
        # It comes, and is given up before anybody could look at it.
        may_end.set()
        for each in threads:
            each.join(30)
        await asyncio.sleep(0)
    running.cancel()
    may_end.set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(asyncio.CancelledError):
            await running
        for each in threads:
            await asyncio.to_thread(each.join, 30)
        await asyncio.sleep(0)
        del running
        gc.collect()
