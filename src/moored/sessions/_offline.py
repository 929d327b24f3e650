"""A session without a server: it is online, takes sends, and nothing leaves.

What a bot sees is what it would see of a good day: it comes online, its sends are confirmed, and
after `disconnect` they are not sent. What the protocol would refuse to write, whatever the server
says, is refused here too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ._acks import Parked
from ._core import Dial
from ._errors import NotConnected, SessionError
from ._protocol import Notice, Outgoing

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["Offline"]

#: How many sends are kept to be looked at.
KEPT = 1000


class Offline:
    """What stands in for the server.

    :param checks: whether the protocol looks at what is sent. Not where steps of the user would
        have made something else of it: they are not run, and it is not known what.
    """

    __slots__ = ("_checks", "_session", "sent")

    def __init__(self, session: Session, *, checks: bool) -> None:
        self._session = session
        self._checks = checks
        #: What was sent, the newest last.
        self.sent: deque[Outgoing] = deque(maxlen=KEPT)

    def start(self) -> None:
        """Be online from the first moment on: there is nobody to wait for."""
        session = self._session
        match session._core.next(session._clock.monotonic()):
            case Dial(generation=generation):
                self.open(generation)

    def open(self, generation: int) -> None:
        """The link that there would be now is open, and ready."""
        session = self._session
        core = session._core
        if core.dialled(generation) and core.ready(generation, session._clock.monotonic()):
            session._changed()
            held, session._outbox = session._outbox, []
            for parked in held:
                if parked.outcome is None:
                    self.send(parked)

    def send(self, parked: Parked) -> None:
        """Confirm a send, or say why it could not have been written."""
        session, outgoing = self._session, parked.outgoing
        parked.stage = "relay"
        if not session._core.online:
            session._queue(parked)
            return
        try:
            if self._checks:
                session.protocol.sandbox_check(session.profile, outgoing)
            extra = session.protocol.sandbox_extra(outgoing)
        except SessionError as error:
            session._table.failed(parked, error)
            return
        except Exception as error:
            session._senders.crashed(outgoing.recipient, error)
            return
        self.sent.append(outgoing)
        session._table.written(parked, session.generation)
        session._table.confirmed(parked.id, extra, session.generation)

    def answer(self, question: Any) -> Any:
        """What the server would answer."""
        session = self._session
        if not session._core.online:
            raise NotConnected(session._why_offline())
        if isinstance(question, Notice):
            return None
        return session.protocol.sandbox_answer(question)
