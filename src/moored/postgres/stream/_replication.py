"""The replication client: one connection that streams.

It connects, runs the setup and reports each step, waits for `start_streaming()`, and then receives
transactions until it fails or is cancelled. A client runs once: after a failure, the manager
creates a new one.

While it streams, it runs two tasks. One reads, and pauses while a consumer's queue is full. The
other sends status updates: it confirms positions (after they were stored, never before), also while
reading is paused, and requests a reply when the server is silent.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from moored.kernel import Clock

from .._errors import StreamEnded
from .._position import History
from .._settings import Settings
from ..decode import (
    KEEPALIVE,
    Assembler,
    Body,
    Committed,
    PrimaryKeepalive,
    Shelf,
    Types,
    read_keepalive,
)
from ..server import Setup, Step
from ._collector import LogCollector
from ._lag import Lag
from ._link import KEEPALIVES, ReplicationLink
from ._positions import Positions

__all__ = ["ReceivedTotals", "ReplicationClient"]

log = logging.getLogger("moored.postgres")

#: Half of the seconds of silence after which the connection is aborted. The server is sent a
#: request for a reply after a third of them.
SILENCE = 4.5
#: The timeout of a command that does not wait for other sessions, in seconds.
PROMPT = 10.0
#: Seconds after which a standby requests the lock again: the statement that waits has a snapshot,
#: which keeps VACUUM from removing rows in the whole server.
RENEW = 300.0
#: Seconds that a standby which ends waits until that request is cancelled.
LEAVE = 1.0
#: The shortest time between two status updates, in seconds.
PROGRESS_EVERY = 0.1
#: After so many seconds, acknowledgements are stored although the slowest consumer has made none.
STORE_EVERY = 1.0


@dataclass
class ReceivedTotals:
    """What all connections of a stream have received."""

    transactions: int = 0
    bytes: int = 0
    #: When the server was last heard, in monotonic seconds; None if it never was.
    heard_at: float | None = None


@dataclass(eq=False, kw_only=True)
class ReplicationClient:
    """One connection that streams, from its setup to its end."""

    conninfo: Callable[[], Awaitable[str]]
    settings: Settings
    hub: LogCollector
    clock: Clock
    #: Called with each step of the setup.
    report: Callable[[Step], None]
    #: Called when the first message of the stream was received.
    first_message: Callable[[], None]
    #: Counts what this connection receives, too.
    totals: ReceivedTotals
    #: The types of the database; for each connection, they are described again.
    types: Types
    #: Adds types to `types`.
    describe_types: Callable[[Collection[int]], Awaitable[None]]
    #: Called with each transaction that has published to an outbox.
    published: Callable[[Committed], None]

    def __post_init__(self) -> None:
        self.setup = Setup(self.settings)
        self._go = asyncio.Event()
        self._status_due = asyncio.Event()
        self._link: ReplicationLink | None = None
        self._arrived_at = 0.0
        self._arrivals = 0
        self._requested_at: float | None = None
        self._paused = False
        self.positions: Positions | None = None
        # The last keepalive that all consumers have passed, until that is stored.
        self._passed: PrimaryKeepalive | None = None
        # Whether consumers have acknowledged transactions since positions were stored, and when.
        self._unstored = False
        self._stored_at = 0.0
        #: The age of the oldest unacknowledged transaction.
        self.lag = Lag()

    @property
    def silent_for(self) -> float:
        """Seconds since the last byte, if a requested reply is overdue; else 0.0.

        The server also replies late while it reads through a large transaction of other tables.
        """
        now, requested_at = self.clock.monotonic(), self._requested_at
        if self._paused or requested_at is None or now - requested_at < SILENCE / 2:
            return 0.0
        return now - self._arrived_at

    # -- the connection ------------------------------------------------------------------------

    @property
    def dialed(self) -> bool:
        """Whether the connection was opened."""
        return self._link is not None

    async def run(self) -> None:
        """Connect, set up, wait for `start_streaming()`, stream; until an error or cancellation."""
        self.report(Step.CONNECTED)
        self._link = link = await ReplicationLink.dial(
            await self.conninfo(),
            timeout=self.settings.connect_timeout,
            application_name=self.settings.application_name,
            **KEEPALIVES,
        )
        self.totals.heard_at = self.clock.monotonic()
        try:
            await self._set_up(link)
            await self._wait_to_stream(link)
            await self._stream(link)
        except asyncio.CancelledError:
            raise  # the connection is closed properly, with a Terminate message
        except BaseException:
            link.cut()
            raise
        finally:
            await link.close()

    def start_streaming(self) -> None:
        """Let the stream start: the rest of the system is ready."""
        self._go.set()

    async def send_final_status(self) -> None:
        """Send a last status update, so that confirmed transactions are not sent again."""
        if self._link is not None and self.positions is not None and not self._link.closed:
            await self._send_status(self._link)

    def cut(self) -> None:
        """Abort the connection."""
        if self._link is not None:
            self._link.cut()

    async def _set_up(self, link: ReplicationLink) -> None:
        setup = self.setup
        reported: Step | None = None
        while (command := setup.command()) is not None:
            if setup.step is not reported:
                reported = setup.step
                self.report(setup.step)
            try:
                if setup.step is Step.ACQUIRE_LOCK:
                    rows = await _locked(link, command)
                else:
                    rows = await link.command(command, timeout=None if setup.waits else PROMPT)
            except psycopg.Error as error:
                setup.refused(error.sqlstate, error)
            else:
                setup.answered(rows)
        self.report(Step.READY_TO_STREAM)

    async def _wait_to_stream(self, link: ReplicationLink) -> None:
        """Wait for `start_streaming()`; query the server meanwhile to notice a lost connection."""
        go = asyncio.ensure_future(self._go.wait())
        try:
            while not go.done():
                await asyncio.wait({go}, timeout=SILENCE)
                if not go.done():
                    await link.command("SELECT 1", timeout=PROMPT)
        finally:
            go.cancel()

    # -- streaming -----------------------------------------------------------------------------

    async def _stream(self, link: ReplicationLink) -> None:
        found = self.setup.findings
        self.report(Step.START_STREAMING)
        await link.stream(self.setup.start_command(), timeout=PROMPT)
        self.report(Step.STREAMING)
        self.positions = Positions(found.confirmed)
        self.hub.begin(History(found.system_id, found.timeline_id), found.confirmed)
        self._note_arrival(link)
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(link), name="moored-replication-read")
            answers = tasks.create_task(self._answer(link), name="moored-replication-answer")
            reader.add_done_callback(lambda _: answers.cancel())

    async def _read(self, link: ReplicationLink) -> None:
        hub, shelf = self.hub, Shelf(self.settings.state_dir / "spill")
        assembler = Assembler(partial(Body, shelf), self.types, messages=self.settings.messages)
        self.types.expire()
        first = True
        while True:
            batch = await link.receive()
            self._note_arrival(link)
            if first:
                first = False
                self.first_message()
            place = 0
            while place < len(batch):
                done, place = assembler.feed_all(batch, place)
                if assembler.unknown_types:
                    # Before a consumer can read a row of them.
                    await self.describe_types(assembler.unknown_types)
                    assembler.unknown_types = set()
                for each in done:
                    if each.wakes:
                        self.published(each)
                # Consumers, and their positions, know nothing of those that were only messages.
                if done := [each for each in done if not each.only_messages]:
                    self._received(done)
                    hub.apply_all(done)
                    self._check_progress()
                if assembler.schema_changed:
                    assembler.schema_changed = False
                    hub.check_tables()
                if place < len(batch) and batch[place][0] == KEEPALIVE:
                    self._keepalive(batch[place], inside=assembler.inside)
                    place += 1
            if hub.full:
                self._paused = True
                await hub.room()
                self._paused = False
                self._note_arrival(link)  # the pause was ours: the server was not silent
            else:
                await asyncio.sleep(0)

    def _received(self, done: list[Committed]) -> None:
        assert self.positions is not None
        end = max(each.end_lsn for each in done)
        now = self.clock.monotonic()
        if now >= self.lag.due:
            self.lag.note(self.positions.last_seen, self.positions.flushed + 1, now)
        self.positions.committed(end)
        self.totals.bytes += sum(each.body.size for each in done)
        self.totals.transactions += len(done)

    def _check_progress(self) -> None:
        """Send a status update for transactions that need no acknowledgement of a consumer."""
        assert self.positions is not None
        if min(self.hub.flushed(), self.positions.last_seen) > self.positions.flushed + 1:
            self._status_due.set()

    def _keepalive(self, data: bytes, *, inside: bool) -> None:
        assert self.positions is not None
        keepalive = read_keepalive(data)
        if not inside and self.positions.up_to_date and keepalive.end > self.positions.last_seen:
            # The WAL up to there has nothing for any consumer: the server may discard it, once that
            # is stored. Reading does not wait for it.
            self.hub.passed(keepalive.end)
            self._passed = keepalive
            self._status_due.set()
        elif self.positions.keepalive(keepalive, inside=inside):
            self._status_due.set()

    async def _answer(self, link: ReplicationLink) -> None:
        # While reading is paused, only sending can detect a lost connection.
        every = min(self.setup.findings.wal_sender_timeout / 3, SILENCE)
        while True:
            try:
                async with asyncio.timeout(self._next_status_in(every)):
                    await self._status_due.wait()
            except TimeoutError:
                pass
            self._status_due.clear()
            await self._send_status(link)
            await asyncio.sleep(PROGRESS_EVERY)

    async def _send_status(self, link: ReplicationLink) -> None:
        """Store what is safe, then confirm it to the server."""
        positions, hub = self.positions, self.hub
        assert positions is not None
        if (passed := self._passed) is not None:
            self._passed = None
            await self._store(passed.end)
            positions.keepalive(passed, inside=False)
        safe, confirmed = min(hub.flushed(), positions.last_seen), positions.flushed + 1
        if safe > confirmed or self._next_store_in() == 0:
            await self._store(max(safe, confirmed))
            positions.acknowledged(safe)
        await link.send(positions.status(self.clock.wall(), reply=self._must_request_reply(link)))

    async def _store(self, end: int) -> None:
        """Store all positions; those of fast consumers may be far beyond this LSN."""
        self._unstored, self._stored_at = False, self.clock.monotonic()
        await self.hub.checkpoint(end)

    def _next_store_in(self) -> float:
        """Return the seconds until acknowledgements must be stored."""
        if not self._unstored:
            return math.inf
        return max(0.0, self._stored_at + STORE_EVERY - self.clock.monotonic())

    def _next_status_in(self, every: float) -> float:
        """Return the seconds until the next status update, or until the server is overdue."""
        every = min(every, self._next_store_in())
        if self._paused:
            return every
        return min(every, max(0.0, self._overdue_at() - self.clock.monotonic()))

    def _overdue_at(self) -> float:
        """Return when to request a reply, or when the requested one is given up."""
        if self._requested_at is None:
            return self._arrived_at + SILENCE / 3
        return self._requested_at + SILENCE * 5 / 3

    def _must_request_reply(self, link: ReplicationLink) -> bool:
        """Return whether to request a reply of the server; raise if the last request timed out.

        Unread input is no silence: this process may have been busy. Neither is a long message, as
        long as its bytes arrive.
        """
        if link.arrivals != self._arrivals:
            self._note_arrival(link)
        now = self.clock.monotonic()
        if self._paused or now < self._overdue_at() or link.has_input:
            return False
        if self._requested_at is not None:
            link.cut()
            raise StreamEnded(f"the server has been silent for {now - self._arrived_at:.0f} s")
        self._requested_at = now
        return True

    def progress(self) -> None:
        """Send a status update soon: a consumer has acknowledged a transaction."""
        self._unstored = True
        self._status_due.set()

    def _note_arrival(self, link: ReplicationLink) -> None:
        self._arrivals = link.arrivals
        self._arrived_at = self.totals.heard_at = self.clock.monotonic()
        self._requested_at = None


async def _locked(link: ReplicationLink, command: str) -> Sequence[Sequence[Any]]:
    """Wait for the lock; after `RENEW`, cancel the statement, whose error lets it be sent again."""
    waiting = asyncio.ensure_future(link.command(command))
    try:
        while not (await asyncio.wait({waiting}, timeout=RENEW))[0]:
            await link.cancel()
        return await waiting
    finally:
        if not waiting.done():
            # The server would not notice the end of the connection before it grants the lock.
            with suppress(psycopg.Error, OSError):
                await link.cancel(LEAVE)
            waiting.cancel()
            await asyncio.wait({waiting})
