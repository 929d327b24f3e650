"""A scripted PostgreSQL for simulated schedules: sessions, one lock, one slot, WAL.

It answers the manager's commands as a real server does (other tests send the same commands to a
real one), and can inject faults.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import errors

from moored.postgres._lsn import Lsn

__all__ = ["Server", "Session", "Slot", "Txn"]

_data = struct.Struct("!cQQq")
_begin = struct.Struct("!cQqI")
_commit = struct.Struct("!cBQQq")
_keepalive = struct.Struct("!cQqB")
_status = struct.Struct("!cQQQqB")

#: After so many seconds the system tells a client that the other side has vanished.
TCP_GIVES_UP = 9.0
WAL_SENDER_TIMEOUT = 20.0


@dataclass(frozen=True)
class Txn:
    """A committed transaction in the log."""

    number: int
    commit: int
    end: int

    def messages(self) -> tuple[bytes, bytes]:
        """Its beginning and its end, as pgoutput writes them."""
        head = _data.pack(b"w", self.commit, self.end, 0)
        return (
            head + _begin.pack(b"B", self.commit, 0, self.number),
            head + _commit.pack(b"C", 0, self.commit, self.end, 0),
        )


@dataclass
class Slot:
    """The one replication slot."""

    confirmed: int
    active: Session | None = None
    lost: bool = False


@dataclass(eq=False)
class Session:
    """A connection, as the server sees it."""

    server: Server
    kind: str
    who: str
    pid: int
    #: Whether the server still has it, and whether its bytes still arrive, either way.
    alive: bool = True
    reachable: bool = True
    #: What the client is told when it next looks.
    error: Exception | None = None
    busy: bool = False
    changed_at: float = 0.0
    #: Whether it was ever given the lock.
    granted: bool = False
    #: How much of the log was sent; what else is to be sent before more of it.
    sent: int = 0
    outbox: deque[bytes] = field(default_factory=deque)
    heard_at: float = 0.0
    #: Whether the client has closed it; and whether it may send, once nothing arrives any more.
    closed: bool = False
    closed_at: float = 0.0
    clogged: bool = False
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def rouse(self) -> None:
        """Wake the waiting tasks."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    async def sleep(self, limit: float | None = None, *others: asyncio.Future[None]) -> None:
        """Wait until something happens on this connection, or elsewhere."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        if limit is None and not others:
            await waiter
        else:
            await asyncio.wait(
                [waiter, *others], timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )

    def check(self) -> None:
        """Raise what the client finds out about its connection."""
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        if self.error is not None:
            raise self.error


class Server:
    """One server.

    :param violated: told what should never have been asked for.
    """

    def __init__(self, rng: random.Random, violated: Callable[[str], None]) -> None:
        self.rng = rng
        self.violated = violated
        self._context = copy_context()
        self.up = True
        self.timeline = 1
        self.publication = False
        self.slot: Slot | None = None
        self.log: list[Txn] = []
        #: Where the log ends by now; not only transactions of ours are in it.
        self.end = 0x1000
        self.sessions: dict[int, Session] = {}
        self.owner: Session | None = None
        self._queue: deque[tuple[Session, asyncio.Future[None]]] = deque()
        self._pids = 100
        #: Users who are refused, and why; transactions that a new slot waits for.
        self.refusals: dict[str, str] = {}
        self.blocked_until = 0.0
        #: Whether the lock's wait is cut short by a statement timeout of so many seconds.
        self.statement_timeout: float | None = None
        self.wal_level_logical = True
        #: Whether the process at the other end is stopped.
        self.is_frozen: Callable[[Session], bool] = lambda session: False
        #: Told of what matters to an observer.
        self.on_start: Callable[[Session, int], None] = lambda session, confirmed: None
        self.on_flush: Callable[[Session, int, int], None] = lambda session, before, now: None
        #: How many commands on replication connections are still to lose theirs, before something
        #: was done, or after it.
        self.cuts_before = 0
        self.cuts_after = 0

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def later(self, delay: float, action: Callable[..., Any], *args: Any) -> None:
        """Do something later, whatever becomes of the host on whose behalf."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay, action, *args, context=self._context)

    # -- sessions ------------------------------------------------------------------------------

    async def connect(self, kind: str, who: str) -> Session:
        """A new connection."""
        await self.pause()
        if not self.up:
            raise psycopg.OperationalError("connection failed: Connection refused")
        if (why := self.refusals.get(who)) is not None:
            raise psycopg.OperationalError(f"connection failed: FATAL:  {why}")
        self._pids += 1
        session = Session(self, kind, who, self._pids, changed_at=self.now)
        self.sessions[session.pid] = session
        return session

    async def pause(self) -> None:
        """The time that a question and its answer take."""
        await asyncio.sleep(self.rng.choice((0.001, 0.01, 0.2)))

    def end_session(self, session: Session, why: str = "terminating connection") -> None:
        """End the session at the server; notify the client if the network works."""
        if not session.alive:
            return
        session.alive = False
        self.sessions.pop(session.pid, None)
        if self.slot is not None and self.slot.active is session:
            self.slot.active = None
        if self.owner is session:
            self.owner = None
            self._grant()
        if session.reachable:
            self._tell_client(session, psycopg.OperationalError(why))

    def _tell_client(self, session: Session, error: Exception) -> None:
        if session.error is None:
            session.error = error
        session.rouse()

    def lose(self, session: Session, linger: float) -> None:
        """Drop all traffic silently in both directions."""
        if not session.alive or not session.reachable:
            return
        session.reachable = False
        session.clogged = self.rng.random() < 0.3
        self.later(linger, self.end_session, session)
        streams = self.slot is not None and self.slot.active is session
        if session.clogged or not streams:
            gone = psycopg.OperationalError("could not receive data: Connection timed out")
            self.later(TCP_GIVES_UP, self._tell_client, session, gone)

    def hang_up(self, session: Session) -> None:
        """The client has closed its side."""
        if session.closed:
            return
        session.closed, session.closed_at = True, self.now
        session.rouse()
        if session.reachable:
            # A backend that works on something notices a moment later.
            self.later(self.rng.choice((0.0, 0.0, 0.05, 1.0)), self.end_session, session)

    def restart(self) -> None:
        """Terminate all sessions, and refuse new ones."""
        self.up = False
        for session in list(self.sessions.values()):
            self.end_session(session, "terminating connection due to administrator command")

    # -- the lock ------------------------------------------------------------------------------

    def _grant(self) -> None:
        while self.owner is None and self._queue:
            session, waiting = self._queue.popleft()
            if not session.alive or waiting.done():
                continue
            self.owner = session
            session.granted = True
            session.busy, session.changed_at = False, self.now
            waiting.set_result(None)

    async def _lock(self, session: Session) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.owner is session:
            return
        self._queue.append((session, waiting))
        self._grant()
        limit = self.statement_timeout
        ends = None if limit is None else self.now + limit
        while not waiting.done():
            session.check()
            left = None if ends is None else ends - self.now
            if left is not None and left <= 0:
                waiting.cancel()
                raise errors.QueryCanceled("canceling statement due to statement timeout")
            await session.sleep(left, waiting)
        await self.arrive(session)

    async def arrive(self, session: Session) -> None:
        """The answer comes back, if anything does."""
        while not session.reachable:
            session.check()
            await session.sleep()
        session.check()

    # -- commands ------------------------------------------------------------------------------

    async def execute(self, session: Session, text: str, values: Any = None) -> list[Any]:
        """One command, with its time on the way and all that may happen to it."""
        session.check()
        session.busy = True
        try:
            await self.pause()
            await self.arrive(session)
            if session.kind == "replication":
                self.cuts_before = self._cut(session, self.cuts_before)
            rows = await self._answer(session, text, values)
            if session.kind == "replication":
                self.cuts_after = self._cut(session, self.cuts_after)
            return rows
        finally:
            session.busy, session.changed_at = False, self.now

    def _cut(self, session: Session, left: int) -> int:
        if left > 0 and self.rng.random() < 0.3:
            self.end_session(session, "server closed the connection unexpectedly")
            left -= 1
        session.check()
        return left

    async def _answer(self, session: Session, text: str, values: Any) -> list[Any]:
        for words, answer in _ANSWERS:
            if words in text:
                result = answer(self, session, values)
                rows = await result if asyncio.iscoroutine(result) else result
                session.check()
                return list(rows)
        raise AssertionError(f"a question that is not in the script: {text}")

    def _must_own(self, session: Session, what: str) -> None:
        if self.owner is not session:
            self.violated(f"{session.who} wants to {what} without the lock")

    def identify(self, session: Session, values: Any) -> list[Any]:
        return [("7000", str(self.timeline), str(Lsn(self.end)), "db")]

    def info(self, session: Session, values: Any) -> list[Any]:
        return [("180000", str(session.pid), str(int(WAL_SENDER_TIMEOUT * 1000)))]

    async def lock(self, session: Session, values: Any) -> list[Any]:
        await self._lock(session)
        return [("",)]

    def create_publication(self, session: Session, values: Any) -> list[Any]:
        self._must_own(session, "create the publication")
        if self.publication:
            raise errors.DuplicateObject("publication already exists")
        self.publication = True
        return []

    def check_existing(self, session: Session, values: Any) -> list[Any]:
        return [("t" if self.publication else "f", "f" if self.slot is None else "t", "f")]

    def tables(self, session: Session, values: Any) -> list[Any]:
        return []

    def marker(self, session: Session, values: Any) -> list[Any]:
        return [(self.publication,)]

    def missing(self, session: Session, values: Any) -> list[Any]:
        exist = {"publication": self.publication, "replication slot": self.slot is not None}
        return [(f'{what} "of the test"',) for what, exists in exist.items() if not exists]

    def drop_publication(self, session: Session, values: Any) -> list[Any]:
        self.publication = False
        return []

    async def create_slot(self, session: Session, values: Any) -> list[Any]:
        self._must_own(session, "create the slot")
        if not self.wal_level_logical:
            raise errors.ObjectNotInPrerequisiteState('logical decoding requires "wal_level"')
        if self.slot is not None:
            raise errors.DuplicateObject("replication slot already exists")
        while self.now < self.blocked_until:
            await session.sleep(self.blocked_until - self.now)
            session.check()
        await self.arrive(session)
        if self.slot is not None:
            raise errors.DuplicateObject("replication slot already exists")
        self.slot = Slot(self.end)
        return [("slot", str(Lsn(self.end)), None, "pgoutput")]

    def query_slot(self, session: Session, values: Any) -> list[Any]:
        if self.slot is None:
            return []
        status = "lost" if self.slot.lost else "reserved"
        return [(str(Lsn(self.slot.confirmed)), status, "t", "logical pgoutput postgres", "t")]

    def drop_slot(self, session: Session, values: Any) -> list[Any]:
        if self.slot is None:
            if values is None:
                raise errors.UndefinedObject("replication slot does not exist")
            return []
        if self.slot.active is not None:
            raise errors.ObjectInUse("replication slot is active")
        self.slot = None
        return [("",)]

    def break_lock(self, session: Session, values: Any) -> list[Any]:
        holder, slot = self.owner, self.slot
        if holder is None or slot is None or slot.active is not None or holder.busy:
            return []
        if holder.pid == values["own"] or self.now - holder.changed_at <= values["quiet"]:
            return []
        if holder.reachable and not holder.closed and not self.is_frozen(holder):
            self.violated(f"the lock of a healthy owner, {holder.who}, was broken")
        self.end_session(holder)
        return [(holder.pid, True)]

    def holder(self, session: Session, values: Any) -> list[Any]:
        if self.owner is None:
            return []
        streaming = self.slot is not None and self.slot.active is not None
        return [(self.owner.pid, self.owner.who, "local", 1.0, streaming)]

    def blockers(self, session: Session, values: Any) -> list[Any]:
        return [(7, 1.0, "update")] if self.now < self.blocked_until else []

    def retained(self, session: Session, values: Any) -> list[Any]:
        if self.slot is None:
            return []
        behind = self.end - self.slot.confirmed
        return [(behind, behind, str(Lsn(self.end)), None, "reserved")]

    def is_there(self, session: Session, values: Any) -> list[Any]:
        return [(1,)] if values["pid"] in self.sessions else []

    def terminate(self, session: Session, values: Any) -> list[Any]:
        if (found := self.sessions.get(values["pid"])) is not None:
            if found.who != session.who:
                self.violated(f"{session.who} has ended a connection of {found.who}")
            self.end_session(found)
        return [(found is not None,)]

    def nothing(self, session: Session, values: Any) -> list[Any]:
        return [("1",)]

    # -- the stream ----------------------------------------------------------------------------

    def start(self, session: Session, values: Any) -> list[Any]:
        """START_REPLICATION."""
        self._must_own(session, "stream")
        slot = self.slot
        if slot is None:
            raise errors.UndefinedObject('replication slot "moored_slot_sim" does not exist')
        if slot.lost:
            raise errors.ObjectNotInPrerequisiteState(
                "can no longer get changes from replication slot"
            )
        if slot.active is not None:
            raise errors.ObjectInUse("replication slot is active for PID 1")
        slot.active = session
        session.sent = sum(txn.commit < slot.confirmed for txn in self.log)
        session.heard_at = self.now
        session.outbox.append(self.keepalive(session))
        self.on_start(session, slot.confirmed)
        return []

    def keepalive(self, session: Session, *, reply: bool = False) -> bytes:
        """Return a keepalive with the end of the WAL that was sent."""
        caught_up = session.sent == len(self.log)
        end = self.end if caught_up else self._sent_to(session)
        return _keepalive.pack(b"k", end, 0, reply)

    def _sent_to(self, session: Session) -> int:
        confirmed = self.slot.confirmed if self.slot is not None else 0
        before = self.log[session.sent - 1].end if session.sent else 0
        return max(confirmed, before)

    def signs_of_life(self) -> None:
        """Send keepalives to streaming sessions, and end those that timed out."""
        for session in list(self.sessions.values()):
            if self.slot is None or self.slot.active is not session:
                continue
            if self.now - session.heard_at > WAL_SENDER_TIMEOUT:
                self.end_session(session, "terminating walsender process due to timeout")
            elif session.reachable:
                session.outbox.append(self.keepalive(session, reply=self.rng.random() < 0.5))
                session.rouse()

    def write(self) -> Txn:
        """One more transaction; now and then its commit begins where the last one ended."""
        begin = self.end + self.rng.choice((0, 0x20, 0x100))
        txn = Txn(len(self.log), begin, begin + 0x40)
        self.log.append(txn)
        self.end = txn.end + self.rng.choice((0, 0, 0x80))
        for session in self.sessions.values():
            session.rouse()
        return txn

    def next_messages(self, session: Session) -> list[bytes]:
        """What is sent to a streaming session now."""
        batch = list(session.outbox)
        session.outbox.clear()
        for txn in self.log[session.sent : session.sent + self.rng.randint(1, 4)]:
            begin, commit = txn.messages()
            session.sent += 1
            batch.append(begin)
            if self.rng.random() < 0.2:
                # The sender has read up to the commit, and says so in the middle of sending it.
                batch.append(self.keepalive(session))
            batch.append(commit)
        return batch

    def standby_status(self, session: Session, message: bytes) -> None:
        """Take a status update of the client."""
        if not session.reachable or not session.alive:
            return
        _, _, flushed, _, _, reply = _status.unpack(message)
        session.heard_at = self.now
        slot = self.slot
        if slot is not None and slot.active is session and flushed > slot.confirmed:
            if flushed > self.end:
                self.violated(f"{session.who} says that {flushed:#x} is safe: the log ends before")
            self.on_flush(session, slot.confirmed, flushed)
            slot.confirmed = flushed
        if reply:
            session.outbox.append(self.keepalive(session))
            session.rouse()


_ANSWERS: Sequence[tuple[str, Callable[[Server, Session, Any], Any]]] = (
    ("IDENTIFY_SYSTEM", Server.identify),
    ("server_version_num", Server.info),
    ("pg_advisory_lock", Server.lock),
    ("CREATE PUBLICATION", Server.create_publication),
    ("hashtextextended", Server.marker),
    ("pg_publication_tables", Server.tables),
    ("SELECT format('publication", Server.missing),
    ("FROM pg_catalog.pg_publication WHERE", Server.check_existing),
    ("DROP PUBLICATION", Server.drop_publication),
    ("CREATE_REPLICATION_SLOT", Server.create_slot),
    ("pg_drop_replication_slot", Server.drop_slot),
    ("stuck_backends", Server.break_lock),
    ("pg_locks", Server.holder),
    ("backend_xid IS NOT NULL", Server.blockers),
    ("pg_wal_lsn_diff", Server.retained),
    ("SELECT confirmed_flush_lsn", Server.query_slot),
    ("pg_terminate_backend", Server.terminate),
    ("pg_stat_activity WHERE pid", Server.is_there),
    ("pg_log_standby_snapshot", Server.nothing),
    ("START_REPLICATION", Server.start),
    ("SELECT 1", Server.nothing),
    ("SET ", Server.nothing),
)
