"""Waiting for the first or all of several awaitables, and for work that must not be cancelled."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from moored.kernel import all_of, cut_socket, first_of, uncancelled

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


class Job:
    """Waits for its event, and records how it ended."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.ended = ""

    async def run(self, result: str = "done") -> str:
        self.began.set()
        try:
            await self.go.wait()
            self.ended = result
            return result
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.ended = "cancelled"
            raise


async def fail() -> str:
    raise ValueError("failed")


async def test_first_of_cancels_and_awaits_the_others() -> None:
    first, other = Job(), Job()
    first.go.set()
    await first_of(first.run(), other.run())
    assert (first.ended, other.ended) == ("done", "cancelled")


async def test_first_of_raises_the_error_of_the_first() -> None:
    other = Job()
    with pytest.raises(ValueError, match="failed"):
        await first_of(other.run(), fail())
    assert other.ended == "cancelled"


async def test_first_of_retrieves_every_error_of_those_that_fail_together() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    with pytest.raises(ValueError, match="failed"):
        await first_of(fail(), fail())
    gc.collect()
    assert reported == []


@pytest.mark.parametrize("wait", [first_of, all_of])
async def test_a_cancelled_wait_leaves_no_task(wait: object) -> None:
    jobs = [Job(), Job()]
    waiting = asyncio.create_task(wait(*(job.run() for job in jobs)))  # type: ignore[operator]
    await jobs[1].began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [job.ended for job in jobs] == ["cancelled", "cancelled"]


async def test_all_of_returns_the_results_in_order() -> None:
    jobs = [Job(), Job()]
    for job in jobs:
        job.go.set()
    assert await all_of(jobs[0].run("a"), jobs[1].run("b")) == ["a", "b"]


async def test_all_of_cancels_the_others_when_one_fails() -> None:
    other = Job()
    with pytest.raises(ValueError, match="failed"):
        await all_of(other.run(), fail())
    assert other.ended == "cancelled"


async def test_uncancelled_work_is_cut_and_awaited_when_its_caller_is_cancelled() -> None:
    job = Job()
    waiting = asyncio.create_task(uncancelled(job.run("cut"), job.go.set))
    await job.began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert job.ended == "cut"


async def test_uncancelled_work_is_cut_when_the_timeout_expires() -> None:
    job = Job()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.01 s"):
        await uncancelled(job.run("cut"), job.go.set, timeout=0.01)
    assert job.ended == "cut"


async def test_uncancelled_work_returns_its_result_and_raises_its_error() -> None:
    job = Job()
    job.go.set()
    assert await uncancelled(job.run(), lambda: pytest.fail("cut")) == "done"
    with pytest.raises(ValueError, match="failed"):
        await uncancelled(fail(), lambda: pytest.fail("cut"))


def test_a_cut_socket_ends_for_its_peer_and_stays_open() -> None:
    one, other = socket.socketpair()
    with one, other:
        cut_socket(one.fileno())
        assert other.recv(1) == b""
        assert one.fileno() >= 0


def test_a_closed_socket_can_be_cut() -> None:
    cut_socket(-1)
