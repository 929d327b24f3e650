"""Whether what is kept here still belongs to what the server has.

The server is asked who it is before anything of it is trusted. When it is another database, or
another timeline of the same one (restored from a backup, or a promoted standby), or when the slot
is not where it was left, everything that was kept is reset first, and only then is the new history
written down: a crash in between finds the old one again, and resets again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ._hub import Hub
from ._position import History
from ._setup import Findings
from ._store import StateStore

__all__ = ["Integrity"]

log = logging.getLogger("holdfast.postgres")


class Integrity:
    """Compares, resets, and remembers."""

    def __init__(self, store: StateStore, hub: Hub, tell: Callable[[str, str], None]) -> None:
        self._store = store
        self._hub = hub
        self._tell = tell

    async def check(self, found: Findings) -> None:
        """Compare what was kept with what the server says; reset if it is of another past."""
        history = History(found.system_id, found.timeline_id)
        known = self._store.history()
        reason = self.difference(known, history, found)
        if reason is not None:
            self._tell("warning", reason)
            await self._hub.reset(reason)
        if known != history or reason is not None:
            await asyncio.to_thread(self._store.set_history, history)

    def difference(self, known: History | None, now: History, found: Findings) -> str | None:
        """Why what was kept is of another past; None if it is not."""
        told = self._store.told()
        if known is None:
            # Nothing was kept, or a slot had to be given up: whoever was here before must know.
            return "the replication slot was given up" if self._store.consumers() and told else None
        if known.system_id != now.system_id:
            return f"this is another database (system {now.system_id} instead of {known.system_id})"
        if known.timeline_id != now.timeline_id:
            return (
                f"the database is on timeline {now.timeline_id} instead of {known.timeline_id}: it "
                "was restored to an earlier point, or a standby was promoted"
            )
        if found.slot_created:
            return "the replication slot was missing, and was made anew"
        if told is not None and found.confirmed > told:
            return f"the replication slot was moved by others, from {told} to {found.confirmed}"
        return None

    async def forget(self, reason: str) -> None:
        """The slot was given up: the next check finds no history, and begins a new one."""
        self._tell("warning", reason)
        await self._hub.reset(reason)
        await asyncio.to_thread(self._store.set_history, None)
