"""An outbox of a pool or a URL, which all parts of an app that read it share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moored.kernel import Child, Context
from moored.postgres import Outbox
from moored.service import Wiring

from ._parts import RETRY, STOP_TIMEOUT, PartEntry

__all__ = ["SharedOutbox"]


class SharedOutbox:
    """Opens an outbox for the first part that is ready for it, and closes it after the last one.

    `pg.outbox` is started by its first use instead, and an outbox that was opened before the app is
    left open.
    """

    #: Why a part is not ready while the outbox is not open.
    not_open = "the outbox is not open yet"

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._users = 0
        self._opened_here = False
        self._turn = asyncio.Lock()
        self._open = asyncio.Event()

    async def wait(self) -> None:
        """Wait until the outbox is open."""
        await self._open.wait()

    def child(self, entry: PartEntry, wiring: Wiring) -> Child:
        """Return a child of a part, which keeps the outbox open; a failed opening is retried."""

        async def run(ctx: Context) -> None:
            # The next part starts before it is open: the database may be down for days.
            await entry.begin(ctx, wiring, early=True)
            with entry.failing(wiring):
                if ctx.generation == 1 and not self._open.is_set():  # later, the failure says more
                    wiring.health(entry.name, "starting", self.not_open)
                async with self._in_use():
                    await asyncio.Event().wait()

        return Child("outbox", run, backoff=RETRY, shutdown=STOP_TIMEOUT)

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        outbox = self._outbox
        async with self._turn:
            if not (self._users or outbox.on_first_use or outbox.is_open):
                await outbox.open()
                self._opened_here = True
            self._users += 1
            self._open.set()
        try:
            yield
        finally:
            self._users -= 1
            if self._opened_here and not self._users:
                await outbox.close()
