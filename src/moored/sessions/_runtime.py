"""What the parts of one session share: its state, its sends, its events and its connection.

The user has a `Session`, which calls this. It stays the same object while the parts of the
session's tree are restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moored.kernel import Backoff, Clock, Machine, Recorder, Supervisor, counted, describe
from moored.leases import Lease

from ._content import ConnectionUpdate, Incoming, SenderCrash
from ._counts import SessionCounts
from ._errors import SessionError, SessionStopped
from ._logs import log_change, log_end, log_sender
from ._protocol import CloseClass, InboundStep, Protocol, Step
from ._session import Session
from .events import EventQueue, InboundSteps, Sink
from .link import CHART, ClosingLinks, Credentials, CredentialsProvider, OfflineServer, SessionCore
from .sending import Sends
from .storage import Records

if TYPE_CHECKING:
    from ._sessions import Sessions
    from .link import Connection, Link

__all__ = ["SessionRuntime"]

#: The namespace and the key of what the protocol has to remember.
MEMORY = ("protocol", "memory")


class SessionRuntime:
    """The parts of one session, and what they report to each other."""

    __slots__ = (
        "_changes",
        "_told",
        "clock",
        "closing_links",
        "connect_timeout",
        "connection",
        "core",
        "counts",
        "credentials",
        "lease",
        "memory",
        "name",
        "offline",
        "owner",
        "profile",
        "protocol",
        "recorder",
        "records",
        "sends",
        "session",
        "sink",
        "stop_asked",
        "tree",
    )

    def __init__(
        self,
        owner: Sessions,
        profile: str,
        protocol: Protocol,
        *,
        name: str,
        records: Records,
        steps: Sequence[tuple[str, Step]],
        inbound_steps: Sequence[tuple[str, InboundStep]],
        backoff: Backoff,
        clock: Clock,
        recorder: Recorder,
        connect_timeout: float,
        events: int,
        credentials: CredentialsProvider | None,
        offline: bool,
    ) -> None:
        self.owner = owner
        self.profile = profile
        self.protocol = protocol
        self.name = name
        self.records = records
        self.clock = clock
        self.recorder = recorder
        self.connect_timeout = connect_timeout
        #: What its user has.
        self.session = Session(self)
        machine = Machine(name, CHART, clock=clock, recorder=recorder, history=0)
        self.core = SessionCore(machine, backoff)
        self.counts = SessionCounts()
        self.sends = Sends(self, [*protocol.steps, *steps])
        #: What stands in for the server; None for a session that has one.
        self.offline = OfflineServer(self, checks=not steps) if offline else None
        inbound = [*protocol.inbound_steps, *inbound_steps]
        returns = protocol.redelivers != "never" and not offline
        queue = EventQueue(profile, events, returns=returns, outlives=protocol.outlives)
        self.sink = Sink(queue, InboundSteps(self.session, inbound) if inbound else None)
        #: What the protocol keeps from one link to the next.
        self.memory = protocol.remember()
        self.credentials = Credentials(self, credentials)
        self.lease: Lease | None = None
        #: The current life of the connection, which the supervisor starts.
        self.connection: Connection | None = None
        self.closing_links = ClosingLinks()
        self.tree: Supervisor | None = None
        #: Whether the user has stopped it, before it ended by itself.
        self.stop_asked = False
        # What was last reported about the connection.
        self._told: ConnectionUpdate | None = None
        self._changes: list[asyncio.Future[None]] | None = None

    @property
    def link(self) -> Link | None:
        """The current link, if there is one."""
        return None if self.connection is None else self.connection.link

    # -- the connection ------------------------------------------------------------------------

    def begins(self) -> None:
        """Its tree has been started: it connects by itself from now on."""
        self.core.connect()
        if self.offline is not None:
            self.offline.start()

    async def before_dial(self) -> None:
        """Get the lease, a place in the rate limit, and the credentials for a new link."""
        await self.owner._leasing.renew(self)
        await self.owner._rate.wait()
        await self.credentials.load()

    async def recall(self) -> None:
        """Give the protocol what an earlier process has stored for it."""
        if self.offline is None and (stored := await self.records.get(*MEMORY)) is not None:
            self.protocol.recall(self.memory, stored)

    def remember(self, data: bytes) -> None:
        """Store what the protocol needs in the next process."""
        if not self.owner._storage.durable:
            return  # there is no next process, as far as the storage is concerned

        async def keep() -> None:
            try:
                # Without a worker for the record: this is its only writer.
                await self.records._write(*MEMORY, data)
            except Exception as error:
                text = "what the protocol has to remember could not be kept"
                self.record(text, kind="failure", cause=error)

        self.owner._tasks.start(keep())

    def may_write(self) -> bool:
        """Whether the lease allows to write; without it, the link is aborted."""
        if self.lease is None or self.lease.live:
            return True
        self.fenced()
        return False

    def fenced(self) -> None:
        """Abort the link: the lease is lost, and another process may have it by now."""
        reason = "the lease of its profile was lost"
        core = self.core
        if core.lost(core.generation, CloseClass.TRANSIENT, reason, self.clock.monotonic()):
            self.record(reason, kind="failure")
        self.closing_links.abort()
        if self.connection is not None:
            self.connection.abandon(reason)

    def crashed(self, error: BaseException) -> None:
        """The connection has crashed: settle every send that is under way."""
        self.counts.crashes += 1
        reason = SessionError(f"the session has crashed: {describe(error)}")
        reason.__cause__ = error
        # Not its words: they may be a message's, and this is recorded and logged.
        why = f"the session has crashed: {type(error).__name__}"
        self.core.crashed(why, self.clock.monotonic())
        self.sends.over(reason)
        self.emit("session_crashed", describe(error))
        self.changed()

    def sender_crashed(self, error: Exception, count: int) -> None:
        """A sender has crashed, and so many sends have failed with it."""
        # Not its words: they are a step's, and may say to whom, and what.
        crash = SenderCrash(type(error).__name__, count)
        text = f"a sender has crashed with {counted(count, 'send')}: {crash.error}"
        self.record(text, kind="failure")
        log_sender(self.name, text, error, self.sends.senders.crashes)
        self.emit("sender_crashed", crash)

    def ended(self, reason: str) -> None:
        """The tree is gone: settle every send."""
        if not self.core.stopped:
            self.core.stop(reason)
            if self.tree is not None:  # otherwise the call that starts it raises
                log_end(self.name, reason)
        self.sends.over(SessionStopped(f"the session of {self.profile!r} is stopped: {reason}"))
        self.changed()

    # -- what it reports -----------------------------------------------------------------------

    def emit(self, kind: str, data: Any) -> None:
        """Give the consumer an event."""
        self.sink.put(Incoming(kind, data, self.profile))

    def record(self, text: str, *, kind: str = "info", cause: BaseException | None = None) -> None:
        """Record something about the session."""
        self.recorder.record(self.name, text, kind=kind, cause=cause)

    def changed(self) -> None:
        """Report a change of the state, and wake the calls that wait for one."""
        update = ConnectionUpdate(self.state, *self.core.why)
        if update != self._told:
            self._told = update
            log_change(self.name, update)
            self.emit("connection_update", update)
        self.notify()

    def notify(self) -> None:
        """Wake the calls that wait for a change of the connection or of the sends under way."""
        changes, self._changes = self._changes, None
        for change in changes or ():
            if not change.done():
                change.set_result(None)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for such a change until the condition holds."""
        await asyncio.sleep(0)  # a caller that does this in a loop lets others run
        while not is_so():
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changes = self._changes or []
            self._changes.append(change)
            await change

    @property
    def state(self) -> str:
        """Its state, such as "online" or "connecting/waiting"."""
        state = self.core.machine.state
        return state.phase if state.phase == state.step else str(state)

    @property
    def why_offline(self) -> str:
        """The state in words, with the reason for it."""
        why = f": {self.core.last_reason}" if self.core.last_reason else ""
        return f"the session of {self.profile!r} is {self.core.machine.state}{why}"

    def totals(self) -> dict[str, int]:
        """The counters of the session."""
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
