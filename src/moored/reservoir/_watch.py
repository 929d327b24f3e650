"""The watch of a reservoir: finds out whether its server still answers.

Callers whose statements get no answer keep their own timeouts: the watch only reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from moored.kernel import Context, describe, duration

from ._driver import PING_TIMEOUT, DriverState
from ._item import Place
from ._silence import LOOK, Silence

if TYPE_CHECKING:
    from ._upkeep import Upkeep

__all__ = ["Watch"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")

#: Seconds for the answer of a ready connection, which may be the only one that is dead. After them
#: a new connection is opened.
READY_PATIENCE = 0.75


class Watch(Generic[C]):
    """Looks at the statements in progress, and probes the server if one takes long."""

    def __init__(self, upkeep: Upkeep[C]) -> None:
        self._upkeep = upkeep
        self._silence = Silence()
        self._reported = False

    @property
    def silent_for(self) -> float:
        """Seconds for which the server has been silent, as any pool to it has found; else 0.0."""
        budget, now = self._upkeep.budget, self._upkeep.clock.monotonic()
        known = () if budget is None else budget.silences
        return max((each.seconds(now) for each in known), default=0.0)

    async def run(self, ctx: Context) -> None:
        """Look twice a second, until cancelled."""
        ctx.started()
        upkeep = self._upkeep
        try:
            while True:
                await asyncio.sleep(LOOK)
                if upkeep.budget is not None:
                    upkeep.budget.silences.add(self._silence)
                now = upkeep.clock.monotonic()
                oldest = min(self._busy_since(), default=None)
                if self._silence.look(now, oldest) and self._can_probe():
                    self._silence.asked(now)
                    upkeep.start_opening(self._probe(), "probe")
                self._report()
        finally:
            if upkeep.budget is not None:
                upkeep.budget.silences.discard(self._silence)

    def _busy_since(self) -> Iterator[float]:
        """Yield since when the connections are in use whose statements have no answer yet."""
        upkeep = self._upkeep
        for item in list(upkeep.core.items.values()):
            if item.place is Place.OUT:
                try:
                    if upkeep.recipe.driver.state(item.conn) is DriverState.BUSY:
                        yield item.since
                except Exception as error:  # another thread may be closing it
                    log.debug("%s: the state is unknown: %s", upkeep.name, describe(error))

    def _can_probe(self) -> bool:
        """Whether there is a ready connection, or a new one needs no lease of the cluster."""
        return bool(self._upkeep.core.ready) or not self._upkeep.config.lease_enabled

    async def _probe(self) -> None:
        """Ask the server by a ready connection, then by a new one, which is closed at once.

        The new one is one more than `max_size`, for a moment, but counts in the rate limit.
        """
        upkeep = self._upkeep
        try:
            item = upkeep.pick_ready()
            answers = item is not None and await upkeep.ping_item(item, READY_PATIENCE)
            if answers or (not upkeep.config.lease_enabled and await self._accepts()):
                self._silence.answered(upkeep.clock.monotonic())
        finally:
            self._silence.probing = False
            self._report()

    async def _accepts(self) -> bool:
        """Whether the server answers on a new connection; a refusal is an answer, too."""
        upkeep = self._upkeep
        began = upkeep.clock.monotonic()
        try:
            await upkeep.ask_apart(PING_TIMEOUT)
        except Exception as error:
            log.debug("%s: a probe failed: %s", upkeep.name, describe(error))
            return upkeep.clock.monotonic() - began < READY_PATIENCE
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
