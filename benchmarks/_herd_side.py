"""One pool of herd.py, in its own process.

Prints "full" when the pool is full, waits for a line, runs the workers and prints the tallies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

from _herd_pools import POOLS, SIZE, Herd, Opener, baseline

WORKERS = 100
HOLD = 0.020
THINK = 0.040
AFTER_AN_ERROR = 0.010
#: Seconds in which the workers start one after the other; they are not counted.
WARM_UP = 0.5


@dataclass
class Tally:
    """Operations, new connections and errors, second by second."""

    seconds: int
    begin: float = float("inf")
    done: list[int] = field(default_factory=list)
    connects: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    #: The number of errors of each type.
    kinds: dict[str, int] = field(default_factory=dict)
    longest_wait: float = 0.0

    def __post_init__(self) -> None:
        for counts in (self.done, self.connects, self.errors):
            counts.extend([0] * (self.seconds - len(counts)))

    def add(self, counts: list[int]) -> None:
        """Add one to the current second, if it is counted."""
        second = time.monotonic() - self.begin
        if 0 <= second < self.seconds:
            counts[int(second)] += 1

    @property
    def ended(self) -> bool:
        return time.monotonic() - self.begin >= self.seconds


async def work(herd: Herd, tally: Tally, number: int) -> None:
    """Check out a connection, query, hold it, return it, and sleep; repeat."""
    await asyncio.sleep(number / WORKERS * (HOLD + THINK))
    while not tally.ended:
        try:
            requested = time.monotonic()
            async with herd.block() as conn:
                tally.longest_wait = max(tally.longest_wait, time.monotonic() - requested)
                if await herd.query(conn) != 1:
                    raise AssertionError("SELECT 1 did not return 1")
                await asyncio.sleep(HOLD)
        except AssertionError:
            raise
        except Exception as error:
            tally.add(tally.errors)
            kind = type(error).__name__
            tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
            await asyncio.sleep(AFTER_AN_ERROR)
        else:
            tally.add(tally.done)
            await asyncio.sleep(THINK)


async def open_full(opener: Opener, url: str, tally: Tally, stack: AsyncExitStack) -> Herd:
    """Open a pool, and check that it opened each connection once."""
    number = 0

    def on_connect() -> None:
        nonlocal number
        number += 1
        tally.add(tally.connects)

    herd = await stack.enter_async_context(opener(url, on_connect))
    if number != SIZE:
        raise AssertionError(f"{number} connections were opened instead of {SIZE}")
    return herd


async def run(name: str, url: str, seconds: int) -> dict[str, Tally]:
    tallies = {"baseline": Tally(seconds), "pool": Tally(seconds)}
    async with AsyncExitStack() as stack:
        # The pool that expires last: its connections are young when the work starts.
        beside = await open_full(baseline, url, tallies["baseline"], stack)
        herd = await open_full(POOLS[name], url, tallies["pool"], stack)
        print("full", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        begin = time.monotonic() + WARM_UP
        for tally in tallies.values():
            tally.begin = begin
        await asyncio.gather(
            *(work(beside, tallies["baseline"], number) for number in range(WORKERS)),
            *(work(herd, tallies["pool"], number) for number in range(WORKERS)),
        )
    return tallies


if __name__ == "__main__":
    # Some pools log every refused connect.
    logging.disable()
    found = asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    print(json.dumps({key: asdict(tally) for key, tally in found.items()}))
