"""Links that are closed, and whose socket is still open.

A server that is slow to take what is left to send gets it for a while yet, and a WebSocket waits
for the server's close frame. Until then the account has a link: no other session may have one, here
or elsewhere in the cluster, and a stop that returned earlier would leave an open socket to a loop
that may end next.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._link import Link

__all__ = ["ClosingLinks"]


class ClosingLinks:
    """The links of one session that are closed and whose socket is still open."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        # Rarely there: a plain socket with nothing left to send is gone in the next turn.
        self._links: dict[Link, asyncio.Future[None]] | None = None

    def closed(self, link: Link) -> None:
        """Watch a link that was closed just now."""
        if not link.over:
            self._links = self._links or {}
            self._links[link] = asyncio.get_running_loop().create_future()

    def lost(self, link: Link) -> None:
        """Forget a link whose socket is gone."""
        gone = None if self._links is None else self._links.pop(link, None)
        if gone is not None:
            gone.set_result(None)

    def abort(self) -> None:
        """Abort those that have bytes left to send; the others end by themselves."""
        for link in self._links or ():
            if link.transport is not None and link.transport.pending:
                link.transport.abort()

    async def gone(self, timeout: float) -> None:
        """Wait until every socket is gone, or the timeout has passed."""
        if self._links:
            await asyncio.wait(list(self._links.values()), timeout=timeout)
