"""For how long the event loop was held."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from moored.kernel import Tasks

__all__ = ["holds", "watched_loop"]

#: How often the loop is looked at, in seconds.
TICK = 0.005
#: The CPU seconds for which the loop may be held in a test; the contract is a third.
ALLOWED = 0.15
#: How often the work is done: the CPU time of a virtual machine is lengthened in bursts.
TIMES = 3


class Held:
    """The longest CPU time for which no other task of the loop has run."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        """Watch until the task is cancelled."""
        while True:
            begin = time.thread_time()
            await asyncio.sleep(TICK)
            self.longest = max(self.longest, time.thread_time() - begin)


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Held]:
    """Watch the loop; the garbage collector leaves out what the tests before have left."""
    held, tasks = Held(), Tasks()
    gc.collect()
    gc.freeze()
    try:
        tasks.start(held.watch())
        yield held
        await asyncio.sleep(4 * TICK)
    finally:
        gc.unfreeze()
        await tasks.cancel()


async def holds(work: Callable[[], Awaitable[object]]) -> bool:
    """Return whether some work holds the loop for too long, each time that it is done."""
    for _ in range(TIMES):
        async with watched_loop() as held:
            await work()
        if held.longest < ALLOWED:
            return False
    return True
