"""The internal state of one session: its sends, its events and its connection.

The user's `Session` calls it. It stays the same object while the children of the session's tree are
restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from moored.kernel import Clock, Machine, Reconnect, Supervisor, counted, describe
from moored.leases import Lease

from ._content import ConnectionUpdate, Incoming, SenderCrash
from ._counts import SessionCounts
from ._errors import SessionError, SessionStopped
from ._logs import log_change, log_end, log_sender
from ._protocol import CloseClass, InboundStep, Protocol, Step
from ._session import Session
from .events import EventQueue, InboundSteps, Sink
from .link import (
    CHART,
    PAUSES,
    ClosingLinks,
    Credentials,
    CredentialsProvider,
    OfflineServer,
    SessionCore,
)
from .sending import Sends
from .storage import Corruption, Records

if TYPE_CHECKING:
    from ._sessions import Sessions
    from .link import Connection, Link

__all__ = ["SessionRuntime"]

#: The documented value of `Session.state` and `ConnectionUpdate.state` for each state of the link.
SESSION_STATES = {
    "down/waiting": "connecting/waiting",
    "connecting/dialing": "connecting/dialling",
    "connecting/greeting": "connecting/greeting",
    "connecting/login": "connecting/login",
    "up": "online",
    "off/resting": "offline/resting",
    "off/refused": "offline/refused",
    "off/stopped": "stopped",
}
#: The namespace and the key of the protocol's own record (`Remember`).
MEMORY = ("protocol", "memory")


@dataclass(slots=True, eq=False, repr=False)
class SessionRuntime:
    """The parts of one session, which report to each other through it."""

    owner: Sessions
    profile: str
    protocol: Protocol
    name: str
    steps: InitVar[Sequence[tuple[str, Step]]]
    inbound_steps: InitVar[Sequence[tuple[str, InboundStep]]]
    provider: InitVar[CredentialsProvider | None]
    is_offline: InitVar[bool]
    clock: Clock = field(init=False)
    records: Records = field(init=False)
    #: The public object.
    session: Session = field(init=False)
    core: SessionCore = field(init=False)
    counts: SessionCounts = field(default_factory=SessionCounts)
    sends: Sends = field(init=False)
    #: The stand-in for the server with `offline=True`; otherwise None.
    offline: OfflineServer | None = field(init=False)
    sink: Sink = field(init=False)
    #: The state that the protocol keeps from one link to the next.
    memory: Any = field(init=False)
    credentials: Credentials = field(init=False)
    lease: Lease | None = None
    #: The connection that runs now; the supervisor replaces it after a crash.
    connection: Connection | None = None
    closing_links: ClosingLinks = field(default_factory=ClosingLinks)
    tree: Supervisor | None = None
    #: Whether the user has stopped the session, before it ended by itself.
    stop_requested: bool = False
    _last_update: ConnectionUpdate | None = None
    _changes: list[asyncio.Future[None]] | None = None

    def __post_init__(
        self,
        steps: Sequence[tuple[str, Step]],
        inbound_steps: Sequence[tuple[str, InboundStep]],
        provider: CredentialsProvider | None,
        is_offline: bool,
    ) -> None:
        owner, protocol = self.owner, self.protocol
        self.clock = owner._clock
        self.records = Records(
            owner._storage,
            self.profile,
            on_corrupt=self._corrupt,
            may_write=self._has_lease if owner._leasing.needed else None,
        )
        self.session = Session(self)
        machine = Machine(self.name, CHART, clock=self.clock, recorder=owner.recorder, history=0)
        self.core = SessionCore(Reconnect(machine, PAUSES, owner._backoff.fresh()))
        self.sends = Sends(self, [*protocol.steps, *steps])
        self.offline = OfflineServer(self, not steps) if is_offline else None
        inbound = [*protocol.inbound_steps, *inbound_steps]
        returns = protocol.redelivers != "never" and not is_offline
        queue = EventQueue(self.profile, owner._events, returns, protocol.outlives)
        self.sink = Sink(queue, InboundSteps(self.session, inbound) if inbound else None)
        self.memory = protocol.remember()
        self.credentials = Credentials(self, provider)

    @property
    def link(self) -> Link | None:
        """The current link, or None."""
        return None if self.connection is None else self.connection.link

    # -- the connection ------------------------------------------------------------------------

    def begins(self) -> None:
        """Begin to connect: the tree has been started."""
        self.core.connect(self.clock.monotonic())
        if self.offline is not None:
            self.offline.start()

    async def before_dial(self) -> None:
        """Acquire the lease, wait for the rate limit, and load the credentials for a new link."""
        await self.owner._leasing.renew(self)
        await self.owner._rate.wait()
        await self.credentials.load()

    async def recall(self) -> None:
        """Pass the record of an earlier process to the protocol."""
        if self.offline is None and (stored := await self.records.get(*MEMORY)) is not None:
            self.protocol.recall(self.memory, stored)

    def remember(self, data: bytes) -> None:
        """Store the protocol's record for the next process."""
        if not self.owner._storage.durable:
            return

        async def keep() -> None:
            try:
                # Without a worker for the record: this is its only writer.
                await self.records._write(*MEMORY, data)
            except Exception as error:
                text = "the protocol's record could not be stored"
                self.record(text, kind="failure", cause=error)

        self.owner._tasks.start(keep())

    def may_write(self) -> bool:
        """Whether the lease is live; if it is not, abort the link."""
        if self.lease is None or self.lease.live:
            return True
        self.fenced()
        return False

    def _has_lease(self) -> bool:
        return self.lease is not None and self.lease.live

    def fenced(self) -> None:
        """Abort the link: the lease is lost, and another process may hold it."""
        reason = "the lease of the profile was lost"
        core = self.core
        if core.lost(core.link.number, CloseClass.TRANSIENT, reason, self.clock.monotonic()):
            self.record(reason, kind="failure")
        self.closing_links.abort()
        if self.connection is not None:
            self.connection.abandon(reason)

    def _corrupt(self, found: Corruption) -> None:
        self.emit("record_corrupt", found)
        text = f"a record in {found.namespace} is treated as missing: {found.reason}"
        self.record(text, kind="failure")

    def crashed(self, error: BaseException) -> None:
        """Settle every send: the connection has crashed."""
        self.counts.crashes += 1
        reason = SessionError(f"the session has crashed: {describe(error)}")
        reason.__cause__ = error
        # Without the error's text, which may quote a message: this is recorded and logged.
        why = f"the session has crashed: {type(error).__name__}"
        self.core.crashed(why, self.clock.monotonic())
        self.sends.over(reason)
        self.emit("session_crashed", describe(error))
        self.changed()

    def sender_crashed(self, error: Exception, count: int) -> None:
        """Report that a sender has crashed, and how many sends failed with it."""
        # Without the error's text, which may quote a recipient or a message.
        crash = SenderCrash(type(error).__name__, count)
        lost = counted(count, "send")
        text = f"a step of a send has crashed ({crash.error}), and {lost} to that recipient failed"
        self.record(text, kind="failure")
        log_sender(self.name, text, error, self.sends.senders.crashes)
        self.emit("sender_crashed", crash)

    def ended(self, reason: str) -> None:
        """Settle every send: the tree has ended."""
        if not self.core.stopped:
            self.core.stop(reason)
            if self.tree is not None:  # otherwise `start` raises the reason
                log_end(self.name, reason)
        self.sends.over(SessionStopped(f"the session of {self.profile!r} is stopped: {reason}"))
        self.changed()

    # -- reports -------------------------------------------------------------------------------

    def emit(self, kind: str, data: Any) -> None:
        """Queue an event for the consumer."""
        self.sink.put(Incoming(kind, data, self.profile))

    def record(self, text: str, *, kind: str = "info", cause: BaseException | None = None) -> None:
        """Record an event of the session in the recorder."""
        self.owner.recorder.record(self.name, text, kind=kind, cause=cause)

    def changed(self) -> None:
        """Report a change of the state, and wake the callers of `until`."""
        update = ConnectionUpdate(self.state, *self.core.why)
        if update != self._last_update:
            self._last_update = update
            log_change(self.name, update, self.core.next_attempt_in(self.clock.monotonic()))
            self.emit("connection_update", update)
        self.notify()

    def notify(self) -> None:
        """Wake the callers of `until`: the connection or the sends have changed."""
        changes, self._changes = self._changes, None
        for change in changes or ():
            if not change.done():
                change.set_result(None)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked after each `notify`."""
        await asyncio.sleep(0)  # a caller that does this in a loop must not block it
        while not is_so():
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changes = self._changes or []
            self._changes.append(change)
            await change

    @property
    def state(self) -> str:
        """The state, such as "online" or "connecting/waiting"."""
        return SESSION_STATES[str(self.core.link.machine.state)]

    @property
    def why_offline(self) -> str:
        """The state and its reason, as a sentence."""
        why = f": {self.core.last_reason}" if self.core.last_reason else ""
        return f"the session of {self.profile!r} is {self.state}{why}"

    def totals(self) -> dict[str, int]:
        """Return the counters of the session."""
        return {
            "reconnects": self.core.reconnects,
            "events_dropped": self.sink.queue.dropped,
            "events_returned": self.sink.queue.returned,
            "handler_failures": self.sink.failed,
            "messages_set_aside": self.sink.put_aside,
            "sender_crashes": self.sends.senders.crashes,
            "late_confirmations": self.sends.table.late,
            **self.counts.as_dict(),
        }
