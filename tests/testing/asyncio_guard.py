"""Check the undocumented parts of asyncio that the simulator uses, on the running interpreter.

`test_interpreters` runs this program; it needs only the standard library, and prints the Python
version and the digests of a few schedules.
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys
import threading
from typing import Any

from moored.testing import Deadlock, Sim, SimLoop, run_one


class Spy(asyncio.BaseEventLoop):
    """A loop that records the calls of its base class."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        loop: Any = self
        for _ in range(len(loop._ready)):
            loop._ready.popleft()._run()


def check_the_loop() -> None:
    loop: Any = Spy()
    assert isinstance(loop._ready, collections.deque)
    assert loop._thread_id is None
    assert loop._stopping is False
    assert callable(loop._check_closed)
    handle = loop.call_soon(len, "")
    assert loop._ready[-1] is handle
    assert (handle._cancelled, handle._callback) == (False, len)
    assert handle._context is not None
    timer: Any = asyncio.TimerHandle(1.0, len, ("",), loop, None)
    timer.cancel()
    assert timer._cancelled

    async def thread() -> int | None:
        return loop._thread_id  # type: ignore[no-any-return]

    assert loop.run_until_complete(thread()) == threading.get_ident()
    assert loop.turns > 0
    loop.close()


def check_the_steps_of_a_task() -> None:
    """Check that each step of a task is a handle whose callback is bound to the task."""
    loop: Any = SimLoop(1, drift=False)
    owners: list[Any] = []
    run_once = loop._run_once

    def spy() -> None:
        owners.extend(getattr(handle._callback, "__self__", None) for handle in loop._ready)
        run_once()

    loop._run_once = spy

    async def work() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        await asyncio.Event().wait()

    task: Any = loop.create_task(work())
    assert task._log_destroy_pending is True
    assert task._fut_waiter is None
    loop.call_later(2, task.cancel)
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        pass
    assert sum(owner is task for owner in owners) >= 4, owners
    loop.close()


def check_the_message_of_a_deadlock() -> None:
    async def scenario(sim: Sim) -> None:
        async def waiter() -> None:
            await asyncio.Event().wait()

        await asyncio.create_task(waiter(), name="waiter")

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, Deadlock), outcome
    assert "waiter  waits on  <asyncio.locks.Event object" in str(outcome.error)


async def restarted_server(sim: Sim) -> int:
    """Use streams, timeouts and a task group while the server is restarted and paused."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()

    async def client() -> int:
        answered = 0
        while answered < 5:
            try:
                reader, writer = await asyncio.open_connection("server", 8000)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            try:
                while answered < 5:
                    writer.write(b"hello\n")
                    if not await asyncio.wait_for(reader.readline(), 5):
                        break
                    answered += 1
                    await asyncio.sleep(sim.random(0, 1))
            except OSError:
                pass
            finally:
                writer.close()
        return answered

    server = await sim.serve(echo)
    sim.at(sim.random(0, 2), server.restart)
    sim.at(3.0, server.pause)
    sim.at(4.0, server.resume)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client()) for _ in range(3)]
    return sum(task.result() for task in tasks)


def main() -> None:
    check_the_loop()
    check_the_steps_of_a_task()
    check_the_message_of_a_deadlock()
    digests = []
    for seed in range(20):
        outcome = run_one(restarted_server, seed, check=False)
        assert outcome.result() == 15
        assert run_one(restarted_server, seed).digest == outcome.digest
        digests.append(outcome.digest)
    json.dump({"version": sys.version_info[:2], "digests": digests}, sys.stdout)


if __name__ == "__main__":
    main()
