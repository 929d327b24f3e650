"""The server of a session that was started with `offline=True`: nothing leaves the process.

The session comes online, its sends are confirmed, and after `disconnect` they are `NotSent`.
Content that the protocol cannot write is refused, as with a real server.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moored.kernel import Dial

from .._errors import NotConnected, SessionError
from .._protocol import Notice, Outgoing
from ..sending import Parked

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["OfflineServer"]

#: The most sends that are kept for inspection.
KEPT = 1000


@dataclass(slots=True, eq=False, repr=False)
class OfflineServer:
    """The stand-in for the server."""

    _runtime: SessionRuntime
    # Whether the protocol checks the content of sends. Not if the user has steps: they are not run,
    # and would change the content.
    _checks: bool
    #: The sends, the newest last.
    sent: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=KEPT))

    def start(self) -> None:
        """Come online immediately."""
        runtime = self._runtime
        match runtime.core.link.due(runtime.clock.monotonic()):
            case Dial(number=generation):
                self.open(generation)

    def open(self, generation: int) -> None:
        """Come online, as after a dial, and confirm the sends that waited for it."""
        runtime = self._runtime
        core, sends = runtime.core, runtime.sends
        if core.dialed(generation) and core.ready(generation, runtime.clock.monotonic()):
            runtime.changed()
            held, sends.outbox = sends.outbox, []
            for parked in held:
                if parked.outcome is None:
                    self.send(parked)

    def send(self, parked: Parked) -> None:
        """Confirm a send, or fail it if the protocol could not have written it."""
        runtime, outgoing = self._runtime, parked.outgoing
        sends, generation = runtime.sends, runtime.core.link.number
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
        """Return the protocol's sample answer to a query."""
        runtime = self._runtime
        if not runtime.core.online:
            raise NotConnected(runtime.why_offline)
        if isinstance(question, Notice):
            return None
        return runtime.protocol.sandbox_answer(question)
