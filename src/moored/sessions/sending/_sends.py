"""The sends of a session, from the call of `send()` to the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._checks import check_loop, check_texts, check_timeout
from .._errors import NotConnected, SessionError, SessionStopped
from .._protocol import Outgoing, Step
from ._acks import AckTable, Parked
from ._outcomes import Acked, NotSent, Outcome, Rejected, Unknown
from ._senders import LIMIT, Senders

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["Sends"]


class Sends:
    """The sends of one session without an outcome yet."""

    __slots__ = ("_runtime", "_timer", "draining", "outbox", "senders", "table")

    def __init__(self, runtime: SessionRuntime, steps: Sequence[tuple[str, Step]]) -> None:
        self._runtime = runtime
        self.table = AckTable(self._settled)
        self.senders = Senders(runtime, tuple(steps))
        #: Sends that have passed all steps and wait for the link or its window.
        #: (A list, of at most LIMIT: an empty deque takes 600 bytes, and most are empty.)
        self.outbox: list[Parked] = []
        #: Whether new sends are refused, because the session is being stopped.
        self.draining = False
        # For the next deadline. (A handle of its own: named timers take more memory.)
        self._timer: asyncio.TimerHandle | None = None

    def begin(
        self,
        recipient: str,
        content: Any,
        id: str | None,
        timeout: float,
        idempotent: bool,
        hold: bool,
    ) -> Parked:
        """Register a send, and start its steps."""
        check_texts(recipient=recipient, id=id or "")
        check_timeout(timeout)
        runtime, loop = self._runtime, asyncio.get_running_loop()
        check_loop(loop, runtime.owner._loop)
        parked = Parked(
            Outgoing(id or uuid.uuid4().hex, recipient, content),
            timeout,
            loop.time() + timeout,
            future=loop.create_future(),
            idempotent=idempotent,
            hold=hold,
        )
        if not self.has_room:
            why = f"{LIMIT} sends are in progress: wait for outcomes, or for online()"
            self._settled(parked, NotSent(parked.id, parked.stage, why))
            return parked
        self.table.park(parked)
        if self._timer is None or parked.deadline < self._timer.when():
            self._set_timer(parked.deadline)
        if runtime.core.stopped:
            self.table.failed(parked, SessionStopped(runtime.why_offline))
        elif self.draining:
            why = f"the session of {runtime.profile!r} is being stopped, and accepts no more sends"
            self.table.failed(parked, SessionStopped(why))
        elif runtime.offline is not None:
            runtime.offline.send(parked)
        else:
            self.senders.push(parked)
        return parked

    def relay(self, parked: Parked) -> None:
        """Write a send that has passed all steps, or queue it."""
        parked.stage = "relay"
        link = self._runtime.link
        if link is None or self.outbox or not link.may_send:
            self.queue(parked)
        else:
            link.send(parked)

    def queue(self, parked: Parked) -> None:
        """Queue a send for the window or for a new link, or fail it without a link."""
        core = self._runtime.core
        waits = core.restarting or (parked.hold and core.link.machine.at("connecting", "down"))
        if not (core.online or waits):
            self.table.failed(parked, NotConnected(self._runtime.why_offline))
            return
        self.outbox.append(parked)
        if len(self.outbox) > 2 * len(self.table) + 16:
            self.sweep()

    def sweep(self) -> None:
        """Remove settled sends from the outbox."""
        if self.outbox:
            self.outbox = [each for each in self.outbox if each.outcome is None]

    def over(self, reason: SessionError) -> None:
        """Settle every send, and cancel their steps."""
        self.senders.stop()
        self.table.over(reason)
        self.outbox.clear()
        self._set_timer(None)

    async def drain(self, timeout: float) -> None:
        """Refuse new sends, and wait until the others are settled, or until the timeout."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._runtime.until(lambda: self._runtime.core.stopped or not self.table)

    @property
    def has_room(self) -> bool:
        """Whether fewer than LIMIT sends are unsettled."""
        return len(self.table) < LIMIT

    def _settled(self, parked: Parked, outcome: Outcome) -> None:
        counts = self._runtime.counts
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
        self._runtime.notify()

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self.table.expired(asyncio.get_running_loop().time())
        self.sweep()
        self._set_timer(self.table.next_deadline())
