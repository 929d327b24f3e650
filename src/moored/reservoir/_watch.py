"""The watch of a reservoir: finds out whether its server still answers.

Callers whose statements get no answer keep their own timeouts: the watch only reports.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, TypeVar

from moored.kernel import Callers, Context, describe, duration

from ._driver import PING_TIMEOUT, DriverState
from ._item import Item, Place
from ._silence import LOOK, Silence

if TYPE_CHECKING:
    from ._upkeep import Upkeep

__all__ = ["Watch"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")

#: Seconds for the answer of a ready connection, which may be the only one that is dead. After them
#: a new connection is opened; one that is refused sooner than this was refused by the server.
READY_PATIENCE = 0.75


class Watch(Generic[C]):
    """Looks at the statements in progress, and probes the server if one takes long."""

    def __init__(self, upkeep: Upkeep[C]) -> None:
        self._upkeep = upkeep
        self._silence = Silence()
        # The connections whose statements were running at the last look, and their checkouts.
        self._busy: dict[Item[C], float] = {}
        self._probing = False
        self._reported = False
        #: When the server was last heard; None if it never was.
        self.heard_at: float | None = None
        self._returned = 0

    @property
    def silent_for(self) -> float:
        """Seconds for which the server has been silent, as any pool to it has found; else 0.0."""
        budget, now = self._upkeep.budget, self._upkeep.clock.monotonic()
        known = () if budget is None else budget.silences
        return max((each.seconds(now) for each in known), default=0.0)

    async def run(self, ctx: Context) -> None:
        """Look twice a second, until cancelled."""
        ctx.started()
        try:
            while True:
                await asyncio.sleep(LOOK)
                self._share(True)
                self._look()
                self._report()
        finally:
            self._share(False)

    @property
    def hanging(self) -> Callers:
        """Callers in the queue, and while the server is silent also those with a statement."""
        core, now = self._upkeep.core, self._upkeep.clock.monotonic()
        since = [waiter.since for waiter in list(core.waiting)]
        if self.silent_for:
            since += list(self._busy.values())
        return Callers(len(since), now - min(since, default=now))

    def answered(self) -> None:
        """Note that the server has answered, for example on a new connection."""
        self.heard_at = self._upkeep.clock.monotonic()
        self._silence.answered()

    def _share(self, known: bool) -> None:
        """Let the other pools to the server know of its silence, or no longer."""
        if (budget := self._upkeep.budget) is not None:
            others = budget.silences - {self._silence}
            budget.silences = others | {self._silence} if known else others

    def _look(self) -> None:
        upkeep, before = self._upkeep, self._busy
        ended = any(self._has_ended(item, since) for item, since in before.items())
        self._busy = {
            item: item.since
            for item in list(upkeep.core.items.values())
            if item.place is Place.OUT and self._is_busy(item)
        }
        # A statement that was shorter than the pause between two looks.
        returned = upkeep.core.checkouts - upkeep.core.out - upkeep.core.discards["bad"]
        if ended or (returned > self._returned and not self._silence.is_asked):
            self.heard_at = upkeep.clock.monotonic()
        self._returned = returned
        if ended:
            self._silence.answered()
        stuck = not ended and not before.items().isdisjoint(self._busy.items())
        ready = bool(upkeep.core.ready)
        wanted = self._silence.look(upkeep.clock.monotonic(), stuck=stuck, ready=ready)
        if not wanted or not (ready or self._may_open):
            return
        if self._probing:
            # It was sent before the last answer, and has none yet.
            if not self._silence.held:
                self._silence.asked(upkeep.clock.monotonic())
            return
        self._probing = True
        upkeep.start_opening(self._probe(), "probe")

    def _has_ended(self, item: Item[C], since: float) -> bool:
        """Whether the server has ended the statement that was running at the last look."""
        if item.place is Place.GONE:
            return False  # it may have been closed without an answer
        if item.since != since:
            return True
        try:
            state = self._upkeep.recipe.driver.state(item.conn)
        except Exception:  # another thread may be closing it
            return False
        return state in (DriverState.IDLE, DriverState.TRANSACTION)

    def _is_busy(self, item: Item[C]) -> bool:
        try:
            return self._upkeep.recipe.driver.busy(item.conn)
        except Exception as error:  # another thread may be closing it
            log.debug("%s: the state is unknown: %s", self._upkeep.name, describe(error))
            return False

    @property
    def _may_open(self) -> bool:
        """Whether a new connection needs no lease of the cluster."""
        return not self._upkeep.config.lease_enabled

    async def _probe(self) -> None:
        """Ask the server by a ready connection, then by a new one, which is closed at once.

        The new one is one more than `max_size`, for a moment, but counts in the rate limit.
        """
        upkeep, silence, now = self._upkeep, self._silence, self._upkeep.clock.monotonic
        try:
            item, opened = upkeep.pick_ready(), False
            if item is not None:
                silence.asked(now())
            if item is None or not await upkeep.ping_item(item, READY_PATIENCE):
                opened = self._may_open and await self._accepts()
                if not opened:
                    return
            self.heard_at = now()
            silence.probed(self.heard_at, pinged=item is not None, opened=opened)
        finally:
            self._probing = silence.held = False
            self._report()

    async def _accepts(self) -> bool:
        """Whether the server answers on a new connection; a refusal is an answer, too."""
        upkeep, silence, now = self._upkeep, self._silence, self._upkeep.clock.monotonic
        began, sent = now(), None
        silence.held = True
        try:
            token = await upkeep.turn_apart()
            silence.held, sent = False, now()
            if sent - began > LOOK:
                silence.answered()  # nothing was sent for a while
            silence.asked(sent)
            await upkeep.ask_apart(token, PING_TIMEOUT)
        except Exception as error:
            log.debug("%s: a probe failed: %s", upkeep.name, describe(error))
            return sent is not None and now() - sent < READY_PATIENCE
        return True

    def _report(self) -> None:
        """Log the beginning and the end of a silence, and tell those who wait for changes."""
        silent = self.silent_for
        if bool(silent) == self._reported:
            return
        self._reported = bool(silent)
        upkeep = self._upkeep
        text = "the server answers again"
        if silent:
            text = f"the server has not answered for {duration(silent)}"
            log.warning("%s: %s", upkeep.name, text)
        else:
            log.info("%s: %s", upkeep.name, text)
        upkeep.recorder.record(upkeep.name, text, kind="failure" if silent else "info")
        upkeep.note_change()
