"""Whether a server answers: when a pool probes it, and when the pool reports that it is silent.

A statement without an answer may just take long. So when one has run for `DOUBT` seconds, the pool
sends a probe, and only a probe without an answer makes the server silent::

    answers ──(a statement runs for 0.75 s)──▶ probed ──(3 looks later)──▶ silent
       ▲                                          │                          │
       └──────────(the probe was answered)────────┴──────────────────────────┘

The pool looks twice a second. It counts looks, not seconds: the loop may have been blocked itself.
"""

from __future__ import annotations

__all__ = ["DOUBT", "LOOK", "Silence"]

#: Seconds between two looks.
LOOK = 0.5
#: How long a statement may run before the server is probed, in seconds.
DOUBT = 0.75
#: Looks at a probe without an answer after which the server is silent.
LOOKS = 4
#: Seconds between two probes, while statements run for long and the server answers. The pause grows
#: because an overloaded server must not be probed often.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 16.0


class Silence:
    """Decides when to probe one server, and whether it is silent; no I/O."""

    def __init__(self) -> None:
        #: Whether a probe is under way.
        self.probing = False
        # When the first probe was sent that has no answer yet.
        self._asked: float | None = None
        self._looks = 0
        self._pause = FIRST_PAUSE
        self._next = float("-inf")

    def look(self, now: float, oldest: float | None) -> bool:
        """Return whether to send a probe now.

        :param oldest: since when the oldest statement runs; None if there is none.
        """
        if self._asked is not None:
            self._looks += 1
            return not self.probing
        if oldest is None or now - oldest < DOUBT:
            self._pause, self._next = FIRST_PAUSE, float("-inf")
            return False
        return not self.probing and now >= self._next

    def asked(self, now: float) -> None:
        """Note that a probe was sent."""
        self.probing = True
        if self._asked is None:
            self._asked, self._looks = now, 0

    def answered(self, now: float) -> None:
        """Note that the server has answered."""
        self._asked = None
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def seconds(self, now: float) -> float:
        """Return for how long the server has been silent; 0.0 if it answers, as far as known."""
        return 0.0 if self._asked is None or self._looks < LOOKS else now - self._asked
