"""A supervisor that was not stopped before its loop ends."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moored.kernel import Child, Context, Supervisor

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


async def work(ctx: Context) -> None:
    ctx.started()
    await asyncio.Event().wait()


def test_the_end_of_the_loop_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        root = Supervisor("root", children=[Child("work", work)])
        await root.start()
        raise ValueError("the error that matters")

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="that matters"):
        asyncio.run(main())
    assert caplog.messages == []


async def test_a_child_cancelled_by_other_code_is_restarted_while_the_loop_runs() -> None:
    tasks: list[asyncio.Task[None]] = []
    again = asyncio.Event()

    async def noted(ctx: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        ctx.started()
        if len(tasks) == 2:
            again.set()
        await asyncio.Event().wait()

    async with Supervisor("root", children=[Child("noted", noted)]) as root:
        tasks[0].cancel()
        await asyncio.wait_for(again.wait(), 10)
        assert root.state == "running"
