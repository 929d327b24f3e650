"""The session of a profile by its name: it is looked up at each use, and so outlives any of them.

To whoever checks types, and to `isinstance`, it is a `Session`: it has all that one has, and may be
given to whatever takes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import SessionError
from ._session import Session

if TYPE_CHECKING:
    from ._sessions import Sessions

    _Base = Session
else:
    _Base = object  # nothing is inherited: what it has not itself, it asks the session for

__all__ = ["SessionVia"]


class SessionVia(_Base):
    """The session of a profile, whichever it is just now: usable wherever a session is."""

    __slots__ = ("_sessions", "profile")

    def __init__(self, sessions: Sessions, profile: str) -> None:
        self._sessions = sessions
        self.profile = profile

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # of whoever copies it: there is nothing to look up yet
        session = self._sessions.whereis(self.profile)
        if session is None:
            raise SessionError(f"no session of {self.profile!r} is running: start one")
        return getattr(session, name)

    def __repr__(self) -> str:
        return f"<SessionVia {self.profile!r}: {self._sessions.whereis(self.profile)}>"


Session.register(SessionVia)
