"""A session without a server: it is online, takes sends, and nothing leaves.

What a bot sees is what it would see of a good day: it comes online, its sends are confirmed, and
after `disconnect` they are not sent. What the protocol would refuse to write, whatever the server
says, is refused here too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .._errors import NotConnected, SessionError
from .._protocol import Notice, Outgoing
from ..sending import Parked
from ._core import DialNow

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["OfflineServer"]

#: How many sends are kept to be looked at.
KEPT = 1000


class OfflineServer:
    """What stands in for the server.

    :param checks: whether the protocol looks at what is sent. Not where steps of the user would
        have made something else of it: they are not run, and it is not known what.
    """

    __slots__ = ("_checks", "_runtime", "sent")

    def __init__(self, runtime: SessionRuntime, *, checks: bool) -> None:
        self._runtime = runtime
        self._checks = checks
        #: What was sent, the newest last.
        self.sent: deque[Outgoing] = deque(maxlen=KEPT)

    def start(self) -> None:
        """Be online from the first moment on: there is nobody to wait for."""
        runtime = self._runtime
        match runtime.core.next(runtime.clock.monotonic()):
            case DialNow(generation=generation):
                self.open(generation)

    def open(self, generation: int) -> None:
        """The link that there would be now is open, and ready."""
        runtime = self._runtime
        core, sends = runtime.core, runtime.sends
        if core.dialled(generation) and core.ready(generation, runtime.clock.monotonic()):
            runtime.changed()
            held, sends.outbox = sends.outbox, []
            for parked in held:
                if parked.outcome is None:
                    self.send(parked)

    def send(self, parked: Parked) -> None:
        """Confirm a send, or say why it could not have been written."""
        runtime, outgoing = self._runtime, parked.outgoing
        sends, generation = runtime.sends, runtime.core.generation
        parked.stage = "relay"
        if not runtime.core.online:
            sends.queue(parked)
            return
        try:
            if self._checks:
                runtime.protocol.sandbox_check(runtime.profile, outgoing)
            extra = runtime.protocol.sandbox_extra(outgoing)
        except SessionError as error:
            sends.table.failed(parked, error)
            return
        except Exception as error:
            sends.senders.crashed(outgoing.recipient, error)
            return
        self.sent.append(outgoing)
        sends.table.written(parked, generation)
        sends.table.confirmed(parked.id, extra, generation)

    def answer(self, question: Any) -> Any:
        """What the server would answer."""
        runtime = self._runtime
        if not runtime.core.online:
            raise NotConnected(runtime.why_offline)
        if isinstance(question, Notice):
            return None
        return runtime.protocol.sandbox_answer(question)
