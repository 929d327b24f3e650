"""The replication client: one life of the connection that streams.

It dials, goes through the setup, says so at each step, waits until it is told to stream, and then
receives until it ends. It never lives twice: whoever runs it makes a new one after a failure.

While it streams it does two things at once. One reads, and stops reading while a consumer is full.
The other answers: it tells the server what is safe (after that was kept, never before), gives signs
of life also while nothing is read, and asks for one when the server is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import psycopg

from moored.kernel import Clock

from .._errors import StreamEnded
from .._position import History
from .._settings import Settings
from ..decode import KEEPALIVE, Assembler, Body, Committed, Shelf, read_keepalive
from ..server import Setup, Step
from ._collector import LogCollector
from ._lag import Lag
from ._link import ReplicationLink
from ._positions import Positions

__all__ = ["ReplicationClient"]

log = logging.getLogger("moored.postgres")

#: A server that was silent for so long is asked for a sign of life, and given as long again.
SILENCE = 4.5
#: A command that waits for nobody is answered within this.
PROMPT = 10.0
#: How often the server is told of progress, at most.
PROGRESS_EVERY = 0.1
#: How often it gets a sign of life, at most and if it does not say how patient it is.
SIGN_OF_LIFE = 15.0


class ReplicationClient:
    """One connection that streams, from its dialling to its end.

    :param report: told each step of the setup, when it is reached.
    :param first_message: told when the stream has proven to work.
    """

    def __init__(
        self,
        conninfo: Callable[[], Awaitable[str]],
        settings: Settings,
        hub: LogCollector,
        *,
        dial_options: dict[str, Any] | None = None,
        dial_timeout: float = 30.0,
        shelf: Shelf | None = None,
        clock: Clock,
        report: Callable[[Step], None],
        first_message: Callable[[], None],
    ) -> None:
        self._conninfo = conninfo
        self._dial_options = dial_options or {}
        self._dial_timeout = dial_timeout
        self._hub = hub
        self._clock = clock
        self._report = report
        self._first_message = first_message
        self._shelf = shelf or Shelf()
        self.setup = Setup(settings)
        self._go = asyncio.Event()
        self._news = asyncio.Event()
        self._link: ReplicationLink | None = None
        self._heard_at = 0.0
        self._arrivals = 0
        self._asked_at: float | None = None
        self._paused = False
        self.positions: Positions | None = None
        #: How long something has been waiting to be acknowledged.
        self.lag = Lag()
        #: How many bytes and transactions came in all.
        self.received_bytes = 0
        self.received_transactions = 0

    # -- life ----------------------------------------------------------------------------------

    @property
    def dialled(self) -> bool:
        """Whether the server was reached."""
        return self._link is not None

    async def run(self) -> None:
        """Dial, set up, wait, stream; ends by an error, or by being cancelled."""
        self._report(Step.CONNECTED)
        self._link = link = await ReplicationLink.dial(
            await self._conninfo(), timeout=self._dial_timeout, **self._dial_options
        )
        try:
            await self._set_up(link)
            await self._wait_to_stream(link)
            await self._stream(link)
        except asyncio.CancelledError:
            raise  # whoever ends it has the time to say so to the server
        except BaseException:
            link.cut()
            raise
        finally:
            await link.close()

    def start_streaming(self) -> None:
        """The rest of the system is ready for what comes."""
        self._go.set()

    async def farewell(self) -> None:
        """Tell the server what is safe by now, so that whoever comes next need not do it again."""
        if self._link is not None and self.positions is not None and not self._link.closed:
            await self._tell(self._link)

    def cut(self) -> None:
        """End it at once, without a farewell."""
        if self._link is not None:
            self._link.cut()

    async def _set_up(self, link: ReplicationLink) -> None:
        setup = self.setup
        reported: Step | None = None
        while (command := setup.command()) is not None:
            if setup.step is not reported:
                reported = setup.step
                self._report(setup.step)
            try:
                rows = await link.command(command, timeout=None if setup.waits else PROMPT)
            except psycopg.Error as error:
                setup.refused(error.sqlstate, error)
            else:
                setup.answered(rows)
        self._report(Step.READY_TO_STREAM)

    async def _wait_to_stream(self, link: ReplicationLink) -> None:
        """Wait until it is told to; a server that hangs up meanwhile is noticed."""
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
        self._report(Step.START_STREAMING)
        await link.stream(self.setup.start_command(), timeout=PROMPT)
        self._report(Step.STREAMING)
        self.positions = Positions(found.confirmed)
        self._hub.begin(History(found.system_id, found.timeline_id), found.confirmed)
        self._heard()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(link), name="moored-replication-read")
            answers = tasks.create_task(self._answer(link), name="moored-replication-answer")
            reader.add_done_callback(lambda _: answers.cancel())

    async def _read(self, link: ReplicationLink) -> None:
        hub, shelf = self._hub, self._shelf
        assembler = Assembler(partial(Body, shelf))
        first = True
        while True:
            batch = await link.receive()
            self._heard()
            if first:
                first = False
                self._first_message()
            place = 0
            while place < len(batch):
                done, place = assembler.feed_all(batch, place)
                if done:
                    self._received(done)
                    hub.apply_all(done)
                    self._look_for_progress()
                if place < len(batch) and batch[place][0] == KEEPALIVE:
                    await self._keepalive(batch[place], inside=assembler.inside)
                    place += 1
            if hub.full:
                self._paused = True
                await hub.room()
                self._paused = False
                self._heard()  # it was not the server who was silent
            else:
                await asyncio.sleep(0)

    def _received(self, done: list[Committed]) -> None:
        assert self.positions is not None
        end = max(each.end_lsn for each in done)
        now = self._clock.monotonic()
        if now >= self.lag.due:
            self.lag.note(self.positions.last_seen, self.positions.flushed + 1, now)
        self.positions.committed(end)
        self.received_bytes += sum(each.body.size for each in done)
        self.received_transactions += len(done)

    def _look_for_progress(self) -> None:
        """What concerns nobody, or is safe as soon as it is applied, is told without an ack."""
        assert self.positions is not None
        if min(self._hub.flushed(), self.positions.last_seen) > self.positions.flushed + 1:
            self._news.set()

    async def _keepalive(self, data: bytes, *, inside: bool) -> None:
        assert self.positions is not None
        keepalive = read_keepalive(data)
        if not inside and self.positions.up_to_date and keepalive.end > self.positions.last_seen:
            # Nothing up to there concerns anybody: the server need not keep it for us.
            self._hub.passed(keepalive.end)
            await self._hub.checkpoint(keepalive.end)
        if self.positions.keepalive(keepalive, inside=inside):
            self._news.set()

    async def _answer(self, link: ReplicationLink) -> None:
        patience = self.setup.findings.wal_sender_timeout
        every = min(patience / 3, SIGN_OF_LIFE) if patience else SIGN_OF_LIFE
        # While nothing is read, what is sent is the only way to find out that nobody is there.
        every = min(every, SILENCE)
        while True:
            try:
                async with asyncio.timeout(self._until_next_look(every)):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            await self._tell(link)
            await asyncio.sleep(PROGRESS_EVERY)

    async def _tell(self, link: ReplicationLink) -> None:
        """Tell the server what is safe; first it is kept, then it is told."""
        positions, hub = self.positions, self._hub
        assert positions is not None
        safe = min(hub.flushed(), positions.last_seen)
        if safe > positions.flushed + 1:
            await hub.checkpoint(safe)
            positions.acknowledged(safe)
        await link.send(positions.status(self._clock.wall(), reply=self._must_ask(link)))

    def _until_next_look(self, every: float) -> float:
        """Until the next sign of life is due, or the server's silence must be looked at."""
        if self._paused:
            return every
        since = self._heard_at if self._asked_at is None else self._asked_at
        return min(every, max(0.0, since + SILENCE - self._clock.monotonic()))

    def _must_ask(self, link: ReplicationLink) -> bool:
        """Whether the server must be asked for a sign of life; raises if it did not give one.

        It is never given up unasked, nor with something unread: this process may have been busy.
        Nor within a long message, as long as its bytes arrive.
        """
        if link.arrivals != self._arrivals:
            self._arrivals = link.arrivals
            self._heard()
        now = self._clock.monotonic()
        if self._paused or now - (self._asked_at or self._heard_at) < SILENCE or link.has_input:
            return False
        if self._asked_at is not None:
            link.cut()
            raise StreamEnded(f"the server has been silent for {now - self._heard_at:.0f} s")
        self._asked_at = now
        return True

    def progress(self) -> None:
        """A consumer has acknowledged something."""
        self._news.set()

    def _heard(self) -> None:
        self._heard_at = self._clock.monotonic()
        self._asked_at = None

    def __repr__(self) -> str:
        return f"<ReplicationClient at {self.setup.step.value}>"
