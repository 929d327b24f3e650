"""Why an exclusive lease has a fence: an owner that fell asleep wakes up, and is refused.

The store is in memory; with `redis://…` or `postgresql://…` the two owners may be on different
machines.

Expected output:

    'ledger' has been written with fence 2, so the write with fence 1 was refused: …
    written by the first owner
    written by the second owner
"""

from __future__ import annotations

import asyncio

from moored.leases import FenceRejected, connect

STORE = "memory://example"


class Ledger:
    """What the lease protects: it remembers the newest fence, and refuses every older one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fence = 0

    def write(self, line: str, fence: int) -> None:
        if fence < self.fence:
            raise FenceRejected("ledger", fence=fence, seen=self.fence)
        self.fence = fence
        self.lines.append(line)


async def main() -> None:
    ledger = Ledger()
    async with connect(STORE, service_name="first") as first, connect(STORE) as second:
        sleeper = await first.exclusive("ledger", ttl=180).acquire()
        ledger.write("written by the first owner", fence=sleeper.fence)

        # The first owner stops: a debugger, a swapped-out machine, a long collection. Its time
        # passes; here an operator ends the lease, which comes to the same.
        await second.revoke(sleeper.id, "ledger")

        async with second.exclusive("ledger", ttl=180) as owner:
            ledger.write("written by the second owner", fence=owner.fence)

        # It wakes up, and has not heard yet that it is not the owner any more.
        assert sleeper.live
        try:
            ledger.write("written by a ghost", fence=sleeper.fence)
        except FenceRejected as error:
            print(error)
    print(*ledger.lines, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
