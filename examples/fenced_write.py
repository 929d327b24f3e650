"""Why an exclusive lease has a fence: a paused owner that continues too late is refused.

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
    """The protected resource: it stores the newest fence, and refuses every older one."""

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
        paused = await first.exclusive("ledger", ttl=180).acquire()
        ledger.write("written by the first owner", fence=paused.fence)

        # The first owner is paused, by a debugger, swapping or a garbage collection, and its lease
        # expires. Here an operator revokes the lease, with the same effect.
        await second.revoke(paused.id, "ledger")

        async with second.exclusive("ledger", ttl=180) as owner:
            ledger.write("written by the second owner", fence=owner.fence)

        # The first owner continues, before it has noticed the loss of its lease.
        assert paused.live
        try:
            ledger.write("written by an expired owner", fence=paused.fence)
        except FenceRejected as error:
            print(error)
    print(*ledger.lines, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
