"""One account: what its user calls, and what its parts share.

A session stays the same object while the parts of its tree are restarted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from holdfast.kernel import (
    Backoff,
    Clock,
    Machine,
    Recorder,
    Supervisor,
    counted,
    describe,
    duration,
)
from holdfast.leases import Lease

from ._acks import AckTable, Parked
from ._content import ConnectionUpdate, Event
from ._core import CHART, SessionCore
from ._counts import Counts
from ._errors import NotConnected, SessionError, SessionStopped, StorageError
from ._features import Features, How
from ._outcomes import Acked, NotSent, Outcome, Rejected, Unknown, error_of
from ._protocol import CloseClass, Feature, Outgoing, Protocol, Step
from ._senders import Senders
from ._sink import Handler, Sink

if TYPE_CHECKING:
    from ._connection import Connection
    from ._records import Records
    from ._sessions import Sessions

__all__ = ["Session"]

#: How many sends may be under way at once.
LIMIT = 10_000
#: The namespace and the key of the credentials.
CREDENTIALS = ("creds", "creds")


class Session(Features):
    """One account. It is made by `Sessions.start` or `Sessions.connect`."""

    __slots__ = (
        "__weakref__",
        "_changes",
        "_clock",
        "_connect_timeout",
        "_connection",
        "_core",
        "_counts",
        "_credentials",
        "_lease",
        "_memory",
        "_name",
        "_offline",
        "_outbox",
        "_owner",
        "_recorder",
        "_records",
        "_saving",
        "_senders",
        "_sink",
        "_table",
        "_timer",
        "_told",
        "_tree",
        "profile",
        "protocol",
    )

    def __init__(
        self,
        owner: Sessions,
        profile: str,
        protocol: Protocol,
        *,
        name: str,
        records: Records,
        steps: Sequence[tuple[str, Step]] = (),
        backoff: Backoff,
        clock: Clock,
        recorder: Recorder,
        connect_timeout: float,
        events: int,
        offline: bool = False,
    ) -> None:
        self.profile = profile
        self.protocol = protocol
        self._owner = owner
        self._name = name
        self._records = records
        self._clock = clock
        self._recorder = recorder
        self._connect_timeout = connect_timeout
        #: The last sends of a session without a server; None for one with a server.
        self._offline: deque[Outgoing] | None = deque(maxlen=1000) if offline else None
        machine = Machine(name, CHART, clock=clock, recorder=recorder, history=0)
        self._core = SessionCore(machine, backoff)
        self._table = AckTable(self._settled)
        self._senders = Senders(self, [*protocol.steps, *steps])
        self._sink = Sink(profile, events)
        self._counts = Counts()
        # Sends that are through all steps and wait for their turn at the link.
        # (A list, of at most LIMIT: a deque takes 600 bytes for none, and most have none.)
        self._outbox: list[Parked] = []
        self._memory = protocol.remember()
        self._credentials: bytes | None = None
        self._saving: asyncio.Task[None] | None = None
        self._lease: Lease | None = None
        self._connection: Connection | None = None
        self._tree: Supervisor | None = None
        self._timer: asyncio.TimerHandle | None = None
        # What was said last about the connection.
        self._told: ConnectionUpdate | None = None
        self._changes: list[asyncio.Future[None]] = []

    # -- sending -------------------------------------------------------------------------------

    @overload
    async def send(
        self,
        recipient: str,
        content: Any,
        *,
        id: str | None = None,
        timeout: float = 30.0,
        outcome: Literal[False] = False,
        wait: Literal[True] = True,
        idempotent: bool = False,
        hold: bool = False,
    ) -> Acked: ...

    @overload
    async def send(
        self,
        recipient: str,
        content: Any,
        *,
        id: str | None = None,
        timeout: float = 30.0,
        outcome: bool = False,
        wait: bool = True,
        idempotent: bool = False,
        hold: bool = False,
    ) -> Outcome: ...

    async def send(
        self,
        recipient: str,
        content: Any,
        *,
        id: str | None = None,
        timeout: float = 30.0,
        outcome: bool = False,
        wait: bool = True,
        idempotent: bool = False,
        hold: bool = False,
    ) -> Outcome:
        """Send something, and wait until the server has confirmed it.

        Sends to one recipient go out in the order of the calls, those to others beside them. What
        was not confirmed is raised (`SendRejected`, `SendNotSent`, `SendUnknown`), or returned, if
        `outcome` is true.

        :param id: by which the server and the recipient know it; drawn, if it is not given.
        :param timeout: how long to wait for the confirmation.
        :param wait: if false, return what is known at once, which is `Acked` unless it has failed
            already; what became of it is counted, and told to nobody.
        :param idempotent: write it again, once and with the same id, when the link was lost and
            nobody can say whether it arrived.
        :param hold: without a link, wait for one within the timeout, instead of failing at once.
        """
        parked = self._begin(recipient, content, id, timeout, idempotent, hold)
        if not wait:
            return parked.outcome or Acked(parked.id)
        try:
            found: Outcome = parked.outcome or await parked.future  # type: ignore[misc]
        except asyncio.CancelledError:
            if not parked.written_in:
                self._table.failed(parked, "its caller has gone")
            raise
        if outcome or isinstance(found, Acked):
            return found
        raise error_of(found)

    async def _send(self, recipient: str, content: Any, **how: Unpack[How]) -> Acked:
        return await self.send(recipient, content, **how)

    def _begin(
        self,
        recipient: str,
        content: Any,
        id: str | None,
        timeout: float,
        idempotent: bool,
        hold: bool,
    ) -> Parked:
        _check(recipient=recipient, id=id or "")
        loop = asyncio.get_running_loop()
        now = loop.time()
        parked = Parked(
            Outgoing(id or uuid.uuid4().hex, recipient, content),
            timeout,
            now + timeout,
            future=loop.create_future(),
            idempotent=idempotent,
            hold=hold,
        )
        if len(self._table) >= LIMIT:
            why = f"{LIMIT} sends are under way already: wait for some of them first"
            self._settled(parked, NotSent(parked.id, parked.stage, why))
            return parked
        self._table.park(parked)
        if self._timer is None:
            self._timer = loop.call_at(parked.deadline, self._expire)
        elif parked.deadline < self._timer.when():
            self._timer.cancel()
            self._timer = loop.call_at(parked.deadline, self._expire)
        if self._core.stopped:
            self._table.failed(parked, SessionStopped(self._why_offline()))
        elif self._offline is not None:
            self._offline.append(parked.outgoing)
            self._table.written(parked, -1)
            self._table.confirmed(parked.id, self.protocol.sandbox_extra(parked.outgoing), -1)
        else:
            self._senders.push(parked)
        return parked

    def _relay(self, parked: Parked) -> None:
        """A send is through all steps."""
        parked.stage = "relay"
        if parked.outcome is not None:
            return
        if self._connection is not None:
            self._connection.relay(parked)
        else:
            self._queue(parked)

    def _queue(self, parked: Parked) -> None:
        """It cannot be written now: it waits for its turn, or for a link, or not at all."""
        core = self._core
        if not (core.online or (parked.hold and core.machine.phase == "connecting")):
            self._table.failed(parked, NotConnected(self._why_offline()))
            return
        self._outbox.append(parked)
        if len(self._outbox) > 2 * len(self._table) + 16:
            self._sweep()

    def _sweep(self) -> None:
        """Let go of what waits for its turn and has been settled otherwise."""
        self._outbox = [each for each in self._outbox if each.outcome is None]

    def _settled(self, parked: Parked, outcome: Outcome) -> None:
        counts = self._counts
        match outcome:
            case Acked():
                counts.acked += 1
            case Rejected():
                counts.rejected += 1
            case NotSent():
                counts.not_sent += 1
            case Unknown():
                counts.unknown += 1
        parked.outcome = outcome
        future: Any = parked.future
        if not future.done():
            future.set_result(outcome)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        self._table.expired(loop.time())
        if self._outbox:
            self._sweep()
        if (due := self._table.next_deadline()) is not None:
            self._timer = loop.call_at(due, self._expire)

    # -- asking --------------------------------------------------------------------------------

    async def query(self, question: Any, timeout: float = 20.0) -> Any:
        """Ask the server something that it answers."""
        self._needs(Feature.QUERIES)
        if self._offline is not None:
            return self.protocol.sandbox_answer(question)
        if self._connection is None:
            raise NotConnected(self._why_offline())
        return await self._connection.ask(question, timeout)

    def answer_login(self, answer: Any) -> None:
        """Answer what the event `login` asked for."""
        self._needs(Feature.PAIRING)
        if self._connection is None:
            raise NotConnected(self._why_offline())
        self._connection.answer_login(answer)

    # -- receiving -----------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Event] | None) -> None:
        """Give every event to this handler or queue from now on, and those that waited first."""
        self._sink.attach(handler)

    def events(self) -> AsyncIterator[Event]:
        """Every event from now on, and those that waited first; ends with the session."""
        return self._sink.iterate()

    def _emit(self, kind: str, data: Any) -> None:
        self._sink.put(Event(kind, data, self.profile))

    # -- its connection ------------------------------------------------------------------------

    async def connect(self, timeout: float | None = 30.0) -> None:
        """Connect again after `disconnect`, or after a refusal, and wait until that is done."""
        self._check_running()
        if self._offline is not None:
            return
        self._core.connect("the user connected it")
        self._changed()
        if self._connection is not None:
            self._connection.poke()
        await self.online(timeout)

    async def disconnect(self) -> None:
        """Close the link and make no other; the session stays, and so does its profile."""
        self._check_running()
        if self._core.machine.phase in ("connecting", "online"):
            self._core.disconnect()
            if self._connection is not None:
                self._connection.disconnect("the user disconnected it")
            self._changed()

    async def online(self, timeout: float | None = None) -> None:
        """Wait until there is a link; raises if there will be none, or not within the timeout."""
        if self._offline is not None:
            return
        try:
            async with asyncio.timeout(timeout):
                while not self._core.online:
                    if self._core.stopped:
                        raise SessionStopped(self._why_offline())
                    if self._core.machine.phase == "offline":
                        raise NotConnected(self._why_offline())
                    change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._changes.append(change)
                    await change
        except TimeoutError:
            why = self._why_offline()
            raise NotConnected(f"not online within {timeout:g} s: {why}") from None

    async def stop(self) -> None:
        """End the session, and free its profile."""
        await self._owner.stop(self)

    def _check_running(self) -> None:
        if self._core.stopped:
            raise SessionStopped(self._why_offline())

    def _changed(self) -> None:
        """The state has changed: tell everybody."""
        core = self._core
        update = ConnectionUpdate(self.state)
        if not core.online:
            update = ConnectionUpdate(self.state, core.last_kind, core.last_reason)
        if update != self._told:
            self._told = update
            self._emit("connection_update", update)
        changes, self._changes = self._changes, []
        for change in changes:
            if not change.done():
                change.set_result(None)

    def _why_offline(self) -> str:
        core = self._core
        why = f": {core.last_reason}" if core.last_reason else ""
        return f"the session of {self.profile!r} is {core.machine.state}{why}"

    # -- what its parts tell it ----------------------------------------------------------------

    async def _before_dial(self) -> None:
        """What must be so before a link is made."""
        await self._owner._renew_lease(self)
        await self._owner._may_dial()
        try:
            async with asyncio.timeout(self._connect_timeout):
                if (saving := self._saving) is not None:
                    await asyncio.shield(saving)
                if self._credentials is None:
                    self._credentials = await self._records.get(*CREDENTIALS)
        except Exception as error:
            raise StorageError(
                f"the storage does not give credentials: {describe(error)}"
            ) from error

    def _keep_credentials(self, credentials: bytes) -> None:
        self._credentials = credentials
        if self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        saved: bytes | None = None
        try:
            while (credentials := self._credentials) is not None and credentials is not saved:
                await self._records.put(*CREDENTIALS, credentials)
                saved = credentials
        except Exception as error:
            self._record("the credentials could not be kept", kind="failure", cause=error)
            self._emit("credentials_not_kept", describe(error))
        finally:
            self._saving = None

    def _fenced(self) -> None:
        """The lease is over: not one byte more, because another may have it by now."""
        reason = "the lease of its profile was lost"
        core = self._core
        if core.lost(core.generation, CloseClass.TRANSIENT, reason, self._clock.monotonic()):
            self._record(reason, kind="failure")
        if self._connection is not None:
            self._connection.abandon(reason)

    def _crashed(self, error: BaseException) -> None:
        """The connection has crashed: whoever waits is told at once."""
        self._counts.crashes += 1
        reason = SessionError(f"the session has crashed: {describe(error)}")
        reason.__cause__ = error
        self._core.crashed(str(reason), self._clock.monotonic())
        self._table.over(reason)
        self._outbox.clear()
        self._emit("session_crashed", describe(error))
        self._changed()

    def _sender_crashed(self, error: Exception, count: int) -> None:
        # Not its words: they are a step's, and may say to whom, and what.
        text = f"a sender has crashed with {counted(count, 'send')}: {type(error).__name__}"
        self._record(text, kind="failure")

    def _ended(self, reason: str) -> None:
        """The tree is gone."""
        if not self._core.stopped:
            self._core.stop(reason)
        self._senders.stop()
        self._table.over(SessionStopped(f"the session of {self.profile!r} is stopped: {reason}"))
        self._outbox.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._changed()

    def _record(self, text: str, *, kind: str = "info", cause: BaseException | None = None) -> None:
        self._recorder.record(self._name, text, kind=kind, cause=cause)

    # -- for people ----------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Where it is, such as "online" or "connecting/waiting"."""
        state = self._core.machine.state
        return state.phase if state.phase == state.step else str(state)

    @property
    def generation(self) -> int:
        """The number of its current link."""
        return self._core.generation

    @property
    def fence(self) -> int | None:
        """The fence of its lease, for whatever else this account changes; None without one."""
        return None if self._lease is None else self._lease.fence

    @property
    def records(self) -> Records:
        """What is stored for this account; a change is made by one at a time. For steps."""
        return self._records

    def status(self) -> dict[str, Any]:
        """What there is to know, without contents and recipients."""
        machine, core = self._core.machine, self._core
        return {
            "profile": self.profile,
            "protocol": self.protocol.name,
            "state": self.state,
            "for": self._clock.monotonic() - machine.since,
            "generation": core.generation,
            "reason": core.last_reason,
            "sending": len(self._table),
            "waiting": len(self._outbox),
            "events_waiting": len(self._sink),
            **self._totals(),
        }

    def _totals(self) -> dict[str, int]:
        """What only grows."""
        return {
            "reconnects": self._core.reconnects,
            "events_dropped": self._sink.dropped,
            "handler_failures": self._sink.failed,
            "sender_crashes": self._senders.crashes,
            "late_confirmations": self._table.late,
            **self._counts.as_dict(),
        }

    def __repr__(self) -> str:
        now = self._clock.monotonic() - self._core.machine.since
        under_way = counted(len(self._table), "send")
        return (
            f"<Session {self.profile!r} over {self.protocol.name}: {self.state} for "
            f"{duration(now)}, {under_way} under way>"
        )


def _check(**texts: object) -> None:
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, and not {type(value).__name__}")
