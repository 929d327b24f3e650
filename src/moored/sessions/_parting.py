"""Links that are closed, and have something left to send.

A server that is slow to take it gets it for a while yet. Until then the account has a link: nobody
else may have one, here or elsewhere in the cluster.
"""

from __future__ import annotations

import asyncio

from ._link import Link

__all__ = ["Parting"]


class Parting:
    """The links of one session that are closed and not gone."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        # Hardly ever there: what is written is sent at once, as a rule.
        self._links: dict[Link, asyncio.Future[None]] | None = None

    def closed(self, link: Link) -> None:
        """A link has been closed."""
        if link.transport is not None and not link.over and link.transport.pending:
            self._links = self._links or {}
            self._links[link] = asyncio.get_running_loop().create_future()

    def lost(self, link: Link) -> None:
        """It is gone."""
        gone = None if self._links is None else self._links.pop(link, None)
        if gone is not None and not gone.done():
            gone.set_result(None)

    def abort(self) -> None:
        """Not one byte more."""
        for link in self._links or ():
            if link.transport is not None:
                link.transport.abort()

    async def gone(self, timeout: float) -> None:
        """Wait until there is none, or the time is over."""
        if self._links:
            await asyncio.wait(list(self._links.values()), timeout=timeout)
