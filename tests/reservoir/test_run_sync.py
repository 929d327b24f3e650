"""`run_sync`: coroutines that never suspend, run without an event loop."""

from __future__ import annotations

import asyncio

import pytest

from moored.reservoir._run_sync import run_sync


async def plain(value: int) -> int:
    return value


async def calling_others() -> int:
    return await plain(1) + await plain(2)


def test_a_coroutine_that_never_suspends_returns_its_result() -> None:
    assert run_sync(calling_others()) == 3


def test_an_error_of_the_coroutine_is_raised() -> None:
    async def failing() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_sync(failing())


def test_a_coroutine_that_suspends_is_ended_and_reported() -> None:
    ended: list[str] = []

    async def suspending() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append("yes")

    with pytest.raises(RuntimeError, match="awaited something: use a plain function"):
        run_sync(suspending())
    assert ended == ["yes"]
