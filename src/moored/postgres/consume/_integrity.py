"""Compare the stored state with the server's history before streaming starts.

If it is another database, another timeline of the same one (restored from a backup, or a promoted
standby), or if the slot is not at its known position, all consumers are reset. Only then is the new
history stored: after a crash in between, the old one is found again, and the reset is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from .._lsn import Lsn
from .._position import History
from ..server import Findings
from ..stream import LogCollector
from ._store import StateStore, StoredState, stored

__all__ = ["Integrity"]

log = logging.getLogger("moored.postgres")


@dataclass
class Integrity:
    """Compares the stored state with the server's, and resets the consumers if they differ."""

    store: StateStore
    hub: LogCollector
    #: Emits an event: its name, and the details.
    emit: Callable[[str, str], None]

    async def check(self, found: Findings) -> None:
        """Compare the stored state with the server's; reset all consumers if they differ."""
        history = History(found.system_id, found.timeline_id)
        await self.hub.reload()
        known, state, given_up = await stored(
            lambda: (self.store.history(), self.store.load(), self.store.given_up())
        )
        self.hub.adopted |= known is None and not found.slot_created
        reason = given_up
        if reason is None and known is not None:
            reason = self.difference(known, history, found, state)
        if reason is not None:
            self.emit("warning", reason)
            await self.hub.reset(reason)
        self.hub.check_starts(history, found)
        if reason is not None or known != history or state.confirmed is None:
            await stored(self.store.set_history, history, found.confirmed)

    def difference(
        self, known: History, now: History, found: Findings, state: StoredState
    ) -> str | None:
        """Return why the stored state belongs to another history; None if it does not."""
        confirmed = state.confirmed
        if (other := known.difference(now)) is not None:
            return other
        if found.slot_created:
            return "the replication slot was missing and was created again"
        if confirmed is not None and found.confirmed > confirmed:
            return (
                f"another program has moved the replication slot, from {confirmed} to "
                f"{found.confirmed}"
            )
        if (furthest := _furthest(state)) > found.wal_position:
            return (
                f"the database's WAL ends at {found.wal_position}, and had reached {furthest} "
                "before: a copy of its disk was restored, or it has lost WAL"
            )
        return None

    async def forget(self, reason: str) -> None:
        """Store that the slot was given up: with the next slot, all consumers are reset.

        The `Reset` is not delivered before the next slot exists: a consumer that then takes a new
        copy of the tables finds all later changes in the stream.
        """
        self.emit("warning", reason)
        await stored(self.store.give_up, reason)


def _furthest(state: StoredState) -> Lsn:
    """Return the last LSN that is known to have existed."""
    places = [saved.acknowledged for saved in state.consumers.values()]
    known = [at for at in [state.confirmed, *places] if at is not None]
    return max(known, default=Lsn(0))
