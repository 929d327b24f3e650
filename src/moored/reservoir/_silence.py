"""Whether a server answers: when a pool probes it, and when the pool reports that it is silent.

A statement without an answer may just take long. So when one is running at two looks in a row, and
no other has ended in between, the pool sends a probe, and only a probe without an answer makes the
server silent::

    answers ──(a probe was sent)──▶ asked ──(4 looks later)──▶ silent
       ▲                              │                          │
       └───(the probe was answered, or any statement, or a connect)

The pool looks twice a second. It counts looks, not seconds: the loop may have been blocked itself.
"""

from __future__ import annotations

import math

__all__ = ["LOOK", "Silence"]

#: Seconds between two looks.
LOOK = 0.5
#: Looks at a probe without an answer after which the server is silent.
LOOKS = 4
#: Seconds between two pings of ready connections that were answered.
PAUSE = 1.0
#: The longest pause between two probes that each open a connection. The pause grows because an
#: overloaded server must not be probed often.
LONGEST_PAUSE = 16.0
#: Looks without a reason for a probe after which the pause is short again.
QUIET = 10


class Silence:
    """Decides when to probe one server, and whether it is silent; no I/O."""

    def __init__(self) -> None:
        # When the first probe was sent that has no answer yet, and how many looks ago.
        self._asked: float | None = None
        self._looks = 0
        #: Whether the probe waits for the rate limit, and not for the server.
        self.held = False
        # When the last probe was answered, the pause after one that opens a connection, and whether
        # the last one did although a ready connection was pinged.
        self._probed = -math.inf
        self._pause = PAUSE
        self._slow = False
        self._quiet = 0

    def look(self, now: float, *, stuck: bool, ready: bool) -> bool:
        """Return whether to send a probe now, unless one is under way.

        :param stuck: whether a statement is running, and none has ended, since the last look.
        :param ready: whether a ready connection can be pinged, so that none must be opened.
        """
        if self._asked is not None:
            self._looks += not self.held
            return True
        self._quiet = 0 if stuck else self._quiet + 1
        if self._quiet >= QUIET:
            self._pause, self._slow = PAUSE, False
        pause = PAUSE if ready and not self._slow else self._pause
        return stuck and now - self._probed >= pause

    @property
    def is_asked(self) -> bool:
        """Whether a probe was sent that has no answer yet."""
        return self._asked is not None

    def asked(self, now: float) -> None:
        """Note that a probe was sent."""
        if self._asked is None:
            self._looks = 0
            self._asked = now

    def answered(self) -> None:
        """Note that the server has answered, whatever it was asked."""
        self._asked = None

    def probed(self, now: float, *, pinged: bool, opened: bool) -> None:
        """Note that the server has answered a probe.

        :param pinged: whether a ready connection was pinged.
        :param opened: whether a connection was opened.
        """
        self.answered()
        self._probed = now
        self._slow = pinged and opened
        if opened:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def seconds(self, now: float) -> float:
        """Return for how long the server has been silent; 0.0 if it answers, as far as known."""
        asked = self._asked  # read once: any thread may ask
        return 0.0 if asked is None or self._looks < LOOKS else now - asked
