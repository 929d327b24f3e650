"""The errors of sessions."""

from __future__ import annotations

from moored.kernel import MooredError


class SessionError(MooredError):
    """Base class of the errors of sessions."""


class AlreadyRunning(SessionError):
    """The profile has a session already, here or elsewhere in the cluster."""

    def __init__(self, text: str, current: object = None) -> None:
        super().__init__(text)
        #: The session, if it is in this process; otherwise a text that names the lease's holder.
        self.current = current


class SessionStopped(SessionError):
    """The session was stopped, or has ended after too many crashes."""


class NotConnected(SessionError):
    """The session has no link to the server at the moment."""


class LinkLost(SessionError):
    """The link to the server was lost."""


class SenderCrashed(SessionError):
    """A step of a send raised an unexpected error; all unsettled sends to that recipient failed."""

    def __init__(self, reason: BaseException | str) -> None:
        super().__init__(f"a step of the sends to this recipient has crashed: {reason!r}")
        self.reason = reason


class StepFailed(SessionError):
    """Raised by a step to fail the one send that it was called for."""


class QueryFailed(StepFailed):
    """The server answered a query with an error, or the link was lost before it answered."""

    def __init__(self, text: str, code: object = None) -> None:
        super().__init__(text)
        self.code = code


class QueryTimeout(QueryFailed):
    """The server has not answered a query within the timeout."""


class ProtocolError(SessionError):
    """The server has violated the protocol; the link is closed."""

    def __init__(self, text: str, farewell: bytes = b"") -> None:
        super().__init__(text)
        #: Bytes to send before the link is closed.
        self.farewell = farewell


class Unsupported(SessionError):
    """The protocol does not have the feature that was called."""


class StorageError(SessionError):
    """The storage failed, or cannot be opened."""


class CorruptRecord(StorageError):
    """A record is damaged, or was written with another key."""
