"""One pool of the herd benchmark, in a process of its own: says when it is full, waits for a line,
lets the workers loose and prints what happened."""

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
#: The workers begin one after the other, and what they do until all are at work is not counted.
WARM_UP = 0.5


@dataclass
class Tally:
    """What happened, second by second."""

    seconds: int
    begin: float = float("inf")
    done: list[int] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    #: The kinds of errors, with their number.
    kinds: dict[str, int] = field(default_factory=dict)
    longest_wait: float = 0.0

    def __post_init__(self) -> None:
        for counts in (self.done, self.births, self.errors):
            counts.extend([0] * (self.seconds - len(counts)))

    def add(self, counts: list[int]) -> None:
        """One more in this second, if it is one of those that count."""
        second = time.monotonic() - self.begin
        if 0 <= second < self.seconds:
            counts[int(second)] += 1

    @property
    def over(self) -> bool:
        return time.monotonic() - self.begin >= self.seconds


async def work(herd: Herd, tally: Tally, number: int) -> None:
    """One worker: take a connection, ask, hold it, give it back, think."""
    await asyncio.sleep(number / WORKERS * (HOLD + THINK))
    while not tally.over:
        try:
            asked = time.monotonic()
            async with herd.block() as conn:
                tally.longest_wait = max(tally.longest_wait, time.monotonic() - asked)
                if await herd.ask(conn) != 1:
                    raise AssertionError("the server did not answer 1")
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
    """A pool whose connections were all born just now, and once."""
    number = 0

    def born() -> None:
        nonlocal number
        number += 1
        tally.add(tally.births)

    herd = await stack.enter_async_context(opener(url, born))
    if number != SIZE:
        raise AssertionError(f"{number} connections were born instead of {SIZE}")
    return herd


async def run(name: str, url: str, seconds: int) -> dict[str, Tally]:
    tallies = {"baseline": Tally(seconds), "pool": Tally(seconds)}
    async with AsyncExitStack() as stack:
        # The one that expires comes last: its connections are young when the work begins.
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
    # Some pools tell of every refused connect, which is what is counted here.
    logging.disable()
    found = asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    print(json.dumps({key: asdict(tally) for key, tally in found.items()}))
