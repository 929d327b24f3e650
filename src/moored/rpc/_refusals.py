"""When to refresh credentials that a server has refused: no I/O, no clock.

Invariants:

- credentials are refreshed once, however many calls were refused with them;
- the refusal of a call that began before a refresh does not affect the new credentials;
- credentials that are refused soon after a refresh are wrong, not expired: they are refreshed again
  only after a pause, which grows with each such refusal.
"""

from __future__ import annotations

from moored.kernel import Backoff

__all__ = ["Refusals"]


class Refusals:
    """The refresh state of the credentials of one connection.

    :param backoff: the pauses between refreshes that do not help.
    """

    def __init__(self, backoff: Backoff) -> None:
        #: The number of the current credentials; it grows with each refresh.
        self.number = 0
        #: Whether a refresh is in progress.
        self.refreshing = False
        #: Whether the current credentials were refused, and are not refreshed for now.
        self.refused = False
        self._backoff = backoff
        self._wrong = False
        self._not_before = float("-inf")

    def refuse(self, number: int, now: float) -> bool:
        """Note a refused call with these credentials; return whether to refresh them now."""
        if number != self.number or self.refreshing:
            return False
        if now < self._not_before:
            self.refused = self._wrong = True
            return False
        if not self._wrong:
            self._backoff.succeed()
        self._wrong = False
        self.refreshing = True
        return True

    def refreshed(self, error: BaseException | None, now: float) -> None:
        """Note the outcome of a refresh."""
        self.refreshing = False
        self.refused = self._wrong = error is not None
        if error is None:
            self.number += 1
        self._not_before = now + self._backoff.fail()

    def forked(self) -> None:
        """Note that this process is the child of a fork: a refresh runs in the parent."""
        self.refreshing = False

    @property
    def mended(self) -> bool:
        """Whether a refused call may be retried, with newer credentials."""
        return self.number > 0 and not self.refreshing and not self.refused
