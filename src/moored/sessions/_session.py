"""One account: what its user calls, and what its parts share.

A session stays the same object while the parts of its tree are restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from moored.kernel import (
    Backoff,
    Clock,
    Machine,
    Recorder,
    Supervisor,
    counted,
    describe,
    duration,
)
from moored.leases import Lease

from ._acks import AckTable, Parked
from ._checks import check_handler, check_loop, check_timeout
from ._content import ConnectionUpdate, Event, SenderCrash
from ._core import CHART, SessionCore
from ._counts import Counts
from ._errors import NotConnected, SessionError, SessionStopped, StorageError
from ._logs import log_change, log_end, log_forgetful, log_not_kept, log_sender
from ._offline import Offline
from ._parting import Parting
from ._protocol import CloseClass, Feature, Notice, Protocol, Step
from ._senders import Senders
from ._sending import Sending
from ._sink import Handler, Sink

if TYPE_CHECKING:
    from ._connection import Connection
    from ._records import Records
    from ._sessions import Sessions

__all__ = ["Session"]

#: The namespace and the key of the credentials.
CREDENTIALS = ("creds", "creds")


class Session(Sending):
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
        "_given_under",
        "_lease",
        "_memory",
        "_name",
        "_offline",
        "_owner",
        "_parting",
        "_recorder",
        "_records",
        "_saving",
        "_senders",
        "_sink",
        "_stop_asked",
        "_table",
        "_told",
        "_tree",
        "_unsaved",
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
        # What stands in for the server; None for a session that has one.
        self._offline: Offline | None = Offline(self, checks=not steps) if offline else None
        machine = Machine(name, CHART, clock=clock, recorder=recorder, history=0)
        self._core = SessionCore(machine, backoff)
        self._table = AckTable(self._settled)
        self._senders = Senders(self, [*protocol.steps, *steps])
        returns = protocol.redelivers != "never" and not offline
        self._sink = Sink(profile, events, returns=returns, outlives=protocol.outlives)
        self._counts = Counts()
        # Sends that are through all steps and wait for their turn at the link.
        # (A list, of at most LIMIT: a deque takes 600 bytes for none, and most have none.)
        self._outbox: list[Parked] = []
        self._memory = protocol.remember()
        self._credentials: bytes | None = None
        # Whether the storage does not have them (yet), and the lease that they were given under.
        self._unsaved = False
        self._given_under: Lease | None = None
        self._saving: asyncio.Task[None] | None = None
        self._lease: Lease | None = None
        self._connection: Connection | None = None
        self._parting = Parting()
        self._tree: Supervisor | None = None
        # Whether somebody wanted it to end, before it did so by itself.
        self._stop_asked = False
        self._timer: asyncio.TimerHandle | None = None
        # What was said last about the connection.
        self._told: ConnectionUpdate | None = None
        self._changes: list[asyncio.Future[None]] = []

    # -- asking --------------------------------------------------------------------------------

    async def query(self, question: Any, timeout: float = 20.0) -> Any:
        """Ask the server something, and wait for its answer; there is none to a `Notice`."""
        self._needs(Feature.QUERIES)
        return await self._ask(question, timeout)

    async def _ask(self, question: Any, timeout: float = 20.0) -> Any:
        check_timeout(timeout)
        check_loop(asyncio.get_running_loop(), self._owner._loop)
        if self._offline is not None:
            return self._offline.answer(question)
        if self._connection is None:
            raise NotConnected(self._why_offline())
        if not isinstance(question, Notice):
            return await self._connection.ask(question, timeout)
        self._connection.tell(question.data)
        # It goes out now, and whoever says many of them leaves room for others.
        await asyncio.sleep(0)
        return None

    def answer_login(self, answer: Any) -> None:
        """Answer what the event `login` asked for."""
        self._needs(Feature.PAIRING)
        if self._connection is None:
            raise NotConnected(self._why_offline())
        self._connection.answer_login(answer)

    # -- receiving -----------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Event] | None) -> None:
        """Give every event to this handler or queue from now on, and those that waited first."""
        check_handler(handler)
        self._sink.attach(handler)

    def events(self) -> AsyncIterator[Event]:
        """Every event from now on, and those that waited first; ends with the session."""
        return self._sink.iterate()

    def _emit(self, kind: str, data: Any) -> None:
        self._sink.put(Event(kind, data, self.profile))

    # -- its connection ------------------------------------------------------------------------

    async def connect(self, timeout: float | None = 30.0) -> None:
        """Connect after `disconnect`, or after a refusal, and wait until that is done.

        A session that waits between two attempts makes the next one now.
        """
        self._check_running()
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
        if timeout is not None:
            check_timeout(timeout)
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
        update = ConnectionUpdate(self.state, *core.why)
        if update != self._told:
            self._told = update
            log_change(self._name, update)
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

    def _begins(self) -> None:
        """Its tree has been started: it connects by itself from now on."""
        self._core.connect()
        if self._offline is not None:
            self._offline.start()

    async def _before_dial(self) -> None:
        """What must be so before a link is made."""
        await self._owner._leasing.renew(self)
        await self._owner._may_dial()
        if self._unsaved and self._given_under is self._lease:  # otherwise they may be old
            self._save_soon()
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
        self._credentials, self._given_under = credentials, self._lease
        self._unsaved = True
        if self._owner._forgetful:
            self._owner._forgetful = False
            log_forgetful(self._name)
        self._save_soon()

    def _save_soon(self) -> None:
        if self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        saved: bytes | None = None
        try:
            while (credentials := self._credentials) is not None and credentials is not saved:
                await self._records.put(*CREDENTIALS, credentials)
                saved = credentials
            self._unsaved = False
        except Exception as error:
            self._record("the credentials could not be kept", kind="failure", cause=error)
            log_not_kept(self._name, describe(error))
            self._emit("credentials_not_kept", describe(error))
        finally:
            self._saving = None

    def _fenced(self) -> None:
        """The lease is over: not one byte more, because another may have it by now."""
        reason = "the lease of its profile was lost"
        core = self._core
        if core.lost(core.generation, CloseClass.TRANSIENT, reason, self._clock.monotonic()):
            self._record(reason, kind="failure")
        self._parting.abort()
        if self._connection is not None:
            self._connection.abandon(reason)

    def _crashed(self, error: BaseException) -> None:
        """The connection has crashed: whoever waits is told at once."""
        self._counts.crashes += 1
        reason = SessionError(f"the session has crashed: {describe(error)}")
        reason.__cause__ = error
        # Not its words: they may be a message's, and this is recorded and logged.
        why = f"the session has crashed: {type(error).__name__}"
        self._core.crashed(why, self._clock.monotonic())
        self._table.over(reason)
        self._outbox.clear()
        self._emit("session_crashed", describe(error))
        self._changed()

    def _sender_crashed(self, error: Exception, count: int) -> None:
        # Not its words: they are a step's, and may say to whom, and what.
        crash = SenderCrash(type(error).__name__, count)
        text = f"a sender has crashed with {counted(count, 'send')}: {crash.error}"
        self._record(text, kind="failure")
        log_sender(self._name, text, error, self._senders.crashes)
        self._emit("sender_crashed", crash)

    def _ended(self, reason: str) -> None:
        """The tree is gone."""
        if not self._core.stopped:
            self._core.stop(reason)
            if self._tree is not None:  # otherwise whoever wanted to start it is told
                log_end(self._name, reason)
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
        now = self._clock.monotonic()
        kind, reason = core.why
        return {
            "profile": self.profile,
            "protocol": self.protocol.name,
            "state": self.state,
            "for": now - machine.since,
            "generation": core.generation,
            "kind": None if kind is None else kind.value,
            "reason": reason,
            "next_attempt_in": core.next_attempt_in(now),
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
            "events_returned": self._sink.returned,
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
