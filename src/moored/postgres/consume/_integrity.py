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

from .._lsn import Lsn
from .._position import History
from ..server import Findings
from ..stream import LogCollector
from ._store import StateStore

__all__ = ["Integrity"]

log = logging.getLogger("moored.postgres")


class Integrity:
    """Compares, resets, and remembers."""

    def __init__(
        self, store: StateStore, hub: LogCollector, tell: Callable[[str, str], None]
    ) -> None:
        self._store = store
        self._hub = hub
        self._tell = tell

    async def check(self, found: Findings) -> None:
        """Compare what was kept with what the server says; reset if it is of another past."""
        history = History(found.system_id, found.timeline_id)
        self._hub.reload()
        known = self._store.history()
        self._hub.adopted |= known is None and not found.slot_created
        reason = self.difference(known, history, found)
        if reason is not None:
            self._tell("warning", reason)
            await self._hub.reset(reason)
        self._hub.check_starts(history, found)
        if reason is not None or known != history or self._store.told() is None:
            await asyncio.to_thread(self._store.set_history, history, found.confirmed)

    def difference(self, known: History | None, now: History, found: Findings) -> str | None:
        """Why what was kept is of another past; None if it is not."""
        told, given_up = self._store.told(), self._store.given_up()
        if known is None or given_up is not None:
            return given_up
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
        if (furthest := self._furthest()) > found.wal_position:
            return (
                f"the database's log ends at {found.wal_position}, and was at {furthest} before: a "
                "copy of its disk was put back, or it lost what it had written"
            )
        return None

    def _furthest(self) -> Lsn:
        """The last place in the log that is known to have been there."""
        places = [saved.acknowledged for saved in self._store.consumers().values()]
        return max((at for at in [self._store.told(), *places] if at is not None), default=Lsn(0))

    async def forget(self, reason: str) -> None:
        """The slot was given up: with the next one, everybody begins anew.

        They are told when that is there, and not before: whoever takes a new copy of the tables
        must find everything that is written after it in the stream.
        """
        self._tell("warning", reason)
        await asyncio.to_thread(self._store.give_up, reason)
