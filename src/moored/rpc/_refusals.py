"""Whether a credential that a server has refused is worth a refresh: no I/O, no clock.

What holds:

- a credential is refreshed once, however many calls were refused with it;
- a call that began before a refresh says nothing about the new credential;
- one that is refused soon after its refresh is wrong, and not old: it is refreshed again only after
  a pause, which grows while that goes on. Nobody asks for a wrong token for ever.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from moored.kernel import Backoff

from ._secrets import safe_text, secrets_of

__all__ = ["Refusals", "explained"]


class Refusals:
    """The credentials of one connection, in the order in which they were refreshed.

    :param backoff: the pauses between refreshes that do not help.
    """

    def __init__(self, backoff: Backoff) -> None:
        #: Of the credential in use; it grows with each refresh.
        self.number = 0
        #: A refresh is under way.
        self.refreshing = False
        #: The one in use was refused, and is not refreshed for now.
        self.refused = False
        self._backoff = backoff
        self._wrong = False
        self._not_before = float("-inf")

    def refuse(self, number: int, now: float) -> bool:
        """A call that was made with this credential was refused; whether to refresh it now."""
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
        """The refresh is over."""
        self.refreshing = False
        self.refused = self._wrong = error is not None
        if error is None:
            self.number += 1
        self._not_before = now + self._backoff.fail()

    def abandon(self) -> None:
        """Forget a refresh in progress: it runs in the parent of this forked process."""
        self.refreshing = False

    @property
    def mended(self) -> bool:
        """Whether a call that was refused may be made again: with another credential."""
        return self.number > 0 and not self.refreshing and not self.refused

    def __repr__(self) -> str:
        state = "refreshing" if self.refreshing else "refused" if self.refused else "in use"
        return f"<Refusals: credential {self.number}, {state}>"


def explained(error: BaseException, credentials: Any, token: str, *sent: Any) -> str:
    """Why a refresh failed, without the secrets that are known; what it raises may repeat them.

    :param sent: what calls were made with before.
    """
    try:
        known = credentials.metadata()
    except Exception:
        known = None
    if not isinstance(known, (tuple, list)):
        with suppress(Exception):
            if hasattr(known, "close"):  # a coroutine, which nobody awaits
                known.close()
        return type(error).__name__
    return safe_text(error, secrets_of(token, known, *sent))
