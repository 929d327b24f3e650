"""Closed links whose socket is still open.

A closed link still flushes its send buffer to a slow server, and a WebSocket waits for the server's
close frame. Until then the account has a link: no other session of it may connect, here or
elsewhere in the cluster, and `stop()` must not return, because the event loop may end next.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._link import Link

__all__ = ["ClosingLinks"]


@dataclass(slots=True, eq=False, repr=False)
class ClosingLinks:
    """The closed links of one session whose socket is still open."""

    # Created when needed: a socket with an empty send buffer is gone in the next turn.
    _links: dict[Link, asyncio.Future[None]] | None = None

    def closed(self, link: Link) -> None:
        """Track a link that was just closed."""
        if not link.over:
            self._links = self._links or {}
            self._links[link] = asyncio.get_running_loop().create_future()

    def lost(self, link: Link) -> None:
        """Remove a link whose socket is closed."""
        gone = None if self._links is None else self._links.pop(link, None)
        if gone is not None:
            gone.set_result(None)

    def abort(self) -> None:
        """Abort the links with a filled send buffer; the others end by themselves."""
        for link in self._links or ():
            if link.transport is not None and link.transport.pending:
                link.transport.abort()

    async def gone(self, timeout: float) -> None:
        """Wait until every socket is closed, or until the timeout."""
        if self._links:
            await asyncio.wait(list(self._links.values()), timeout=timeout)
