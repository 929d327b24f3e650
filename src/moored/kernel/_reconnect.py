"""The rules of every link that reconnects: when to dial, and what a report means. No I/O.

::

                  want                  step                up
    off/resting ────────▶ connecting/dialing ──▶ connecting/… ──▶ up
    off/refused            ▲            │              │          │
    off/stopped            │ due        ▼     lost     ▼          ▼
                           └───── down/waiting ◀──────────────────┘

`rest`, `refuse` and `stop` lead from everywhere to `off`; `want` leads back, except after `stop`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ._backoff import Backoff
from ._chart import Chart
from ._errors import BackoffExhausted
from ._machine import Machine
from ._recorder import Cause, in_words

__all__ = ["At", "Dial", "Loss", "Pauses", "Reconnect", "link_chart"]


def link_chart(
    *connecting: str, up: Sequence[str] = (), words: Mapping[str, str] | None = None
) -> Chart:
    """Return the chart of a link.

    :param connecting: the steps of a dial after "dialing"; it may skip and repeat one.
    :param up: the steps of a link that is up, if it has several; the first one is entered.
    :param words: a text for each step, as in `Chart`.
    """
    steps = [f"connecting/{step}" for step in ("dialing", *connecting)]
    ends = ("connecting/dialing", "down", "off/resting", "off/refused", "off/stopped")
    return Chart(
        phases={
            "down": ("waiting",),
            "connecting": ("dialing", *connecting),
            "up": up,
            "off": ("resting", "refused", "stopped"),
        },
        moves={
            **{step: (*steps[number:], "up") for number, step in enumerate(steps)},
            "connecting": ends,
            "up": (*(f"up/{step}" for step in up), *ends),
            "down": ("connecting/dialing", "off/resting", "off/refused", "off/stopped"),
            "off/resting": ("connecting/dialing", "off/stopped"),
            "off/refused": ("connecting/dialing", "off/stopped"),
        },
        initial="off/resting",
        words=words,
    )


class Pauses(NamedTuple):
    """When a lost link is dialed again; the length of the pauses is that of a `Backoff`."""

    #: Seconds after which a link that is up counts as proven: its loss begins the backoff anew.
    proven: float
    #: Whether the loss of a proven link is followed by a dial at once, and not by the first pause.
    at_once: bool = False
    #: The pause after the last attempt that the backoff allows, with the backoff's jitter; another
    #: series of attempts follows. None to refuse instead.
    series: float | None = None


class Dial(NamedTuple):
    """Dial now, and report with this number."""

    number: int


class At(NamedTuple):
    """Call `due` again at this time."""

    time: float


class Loss(NamedTuple):
    """What a loss meant."""

    #: Whether a link was lost, and not only an attempt to make one.
    was_up: bool
    #: Whether it was the last attempt that the backoff allows.
    exhausted: bool
    why: str


@dataclass(slots=True, eq=False, repr=False)
class Reconnect:
    """Decides for one link when to dial, which report is stale, and what a loss means.

    At most one dial is under way. A loss has one due time for the next dial. All attributes may be
    read, and the due time moved. The caller reports with the number of its dial; a report with
    another number changes nothing.

    A user that replaces a link that is up (make before break) increments `dials` for the number of
    that attempt. Meanwhile `number` is still the link's, so that its loss is noticed, and a failed
    attempt has nothing to undo. When the attempt succeeds, or the link is lost before it has ended,
    `number` becomes the attempt's.
    """

    #: Its chart is one of `link_chart`.
    machine: Machine
    pauses: Pauses
    backoff: Backoff
    #: The number of attempts, and the number of the last one.
    dials: int = 0
    #: The number whose reports count: of the dial, or of the link that is up; 0 if there is none.
    number: int = 0
    is_up: bool = False
    #: When the link that is up counts as proven.
    proven_at: float = math.inf
    #: When the next dial is due; None while none is planned.
    next_dial_at: float | None = None
    #: Why the link was last lost, or turned off.
    why: str = ""

    # -- called by the user --------------------------------------------------------------------

    def want(self, now: float, why: Cause) -> None:
        """Dial now, also during a pause; while the link is off, the backoff begins anew."""
        if self.machine.at("connecting", "up", "off/stopped"):
            return
        if self.machine.at("off"):
            self.backoff.succeed()
        self._move("connecting/dialing", why, next_dial_at=now)

    def rest(self, why: Cause) -> bool:
        """End the link until `want`; return whether it was not off already."""
        return not self.machine.at("off") and self._turn_off("off/resting", why)

    def refuse(self, why: Cause) -> bool:
        """Give up until `want`: dialing again would not help; return whether it was not off."""
        return not self.machine.at("off") and self._turn_off("off/refused", why)

    def stop(self, why: Cause) -> bool:
        """End the link for ever; return whether it was not stopped already."""
        return not self.machine.at("off/stopped") and self._turn_off("off/stopped", why)

    # -- called by what dials ------------------------------------------------------------------

    def due(self, now: float) -> Dial | At | None:
        """Return whether to dial now, or when to call this again; None while no dial is planned."""
        if self.next_dial_at is None:
            return None
        if now < self.next_dial_at:
            return At(self.next_dial_at)
        self.next_dial_at = None
        self.dials += 1
        self.number = self.dials
        if self.machine.at("down"):
            self.machine.move("connecting/dialing", cause="the pause has ended")
        return Dial(self.number)

    def is_current(self, number: int) -> bool:
        """Whether reports with this number count."""
        return number == self.number != 0

    def step(self, number: int, name: str, why: Cause) -> bool:
        """Record that the dial has reached this step; return False if the report is stale."""
        if self.is_up or not self.is_current(number):
            return False
        self.machine.move(f"connecting/{name}", cause=why)
        return True

    def up(self, number: int, now: float, why: Cause) -> bool:
        """Record that the dial has succeeded; return False if the report is stale."""
        if self.is_up or not self.is_current(number):
            return False
        self.is_up, self.proven_at = True, now + self.pauses.proven
        self.machine.move("up", cause=why)
        return True

    def proven(self, number: int) -> None:
        """Count the link as proven, however short it was up; a stale report changes nothing."""
        if self.is_up and self.is_current(number):
            self.proven_at = -math.inf

    def lost(
        self, number: int, why: Cause, now: float, *, pause: float | None = None
    ) -> Loss | None:
        """Record that the dial or the link has failed; return None if the report is stale.

        :param pause: seconds until the next dial, if they are known: they are used in place of the
            backoff's, and the failure is not counted.
        """
        if not self.is_current(number):
            return None
        was_up, exhausted = self.is_up, False
        if now >= self.proven_at:
            self.backoff.succeed()
            if pause is None and self.pauses.at_once:
                pause = 0.0
        if pause is None:
            try:
                pause = self.backoff.fail()
            except BackoffExhausted:
                exhausted = True
                if (series := self.pauses.series) is None:
                    self.refuse(f"given up after attempt {self.backoff.attempts}: {in_words(why)}")
                    return Loss(was_up, exhausted, self.why)
                self.backoff.succeed()
                pause = replace(self.backoff, start=series, max=series, max_attempts=None).fail()
        self.why = in_words(why)
        self._move("down" if pause else "connecting/dialing", why, next_dial_at=now + pause)
        return Loss(was_up, exhausted, self.why)

    def _turn_off(self, state: str, why: Cause) -> bool:
        self.why = in_words(why)
        self._move(state, why)
        return True

    def _move(self, state: str, why: Cause, next_dial_at: float | None = None) -> None:
        """Move to a state without a dial or a link."""
        self.number, self.is_up, self.proven_at = 0, False, math.inf
        self.next_dial_at = next_dial_at
        self.machine.move(state, cause=why)
