"""A proxy for the session of a profile, which looks the session up at each use.

To type checkers and to `isinstance` it is a `Session`, and can be used in place of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import SessionError
from ._session import Session

if TYPE_CHECKING:
    from ._sessions import Sessions

    _Base = Session
else:
    _Base = object  # nothing is inherited: other attributes are those of the session

__all__ = ["SessionVia"]


class SessionVia(_Base):
    """The current session of a profile; valid across restarts of the session."""

    __slots__ = ("_sessions", "profile")

    def __init__(self, sessions: Sessions, profile: str) -> None:
        self._sessions = sessions
        self.profile = profile

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy and pickle look for these before `__init__`
        session = self._sessions.whereis(self.profile)
        if session is None:
            raise SessionError(f"no session of {self.profile!r} is running: start one")
        return getattr(session, name)

    def __repr__(self) -> str:
        return f"<SessionVia {self.profile!r}: {self._sessions.whereis(self.profile)}>"


Session.register(SessionVia)
