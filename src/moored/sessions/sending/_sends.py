"""The sends of a session: each call becomes a parked send, which is settled once."""

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
    """The sends of one session that are under way."""

    __slots__ = ("_runtime", "_timer", "draining", "outbox", "senders", "table")

    def __init__(self, runtime: SessionRuntime, steps: Sequence[tuple[str, Step]]) -> None:
        self._runtime = runtime
        self.table = AckTable(self._settled)
        self.senders = Senders(runtime, steps)
        #: Sends that are through all steps and wait for their turn at the link.
        #: (A list, of at most LIMIT: a deque takes 600 bytes for none, and most have none.)
        self.outbox: list[Parked] = []
        #: Whether new sends are refused, because the session ends when these are settled.
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
        """Park a send, and take it through the steps."""
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
            why = f"{LIMIT} sends are under way already: wait for some of them first"
            self._settled(parked, NotSent(parked.id, parked.stage, why))
            return parked
        self.table.park(parked)
        if self._timer is None or parked.deadline < self._timer.when():
            self._set_timer(parked.deadline)
        if runtime.core.stopped:
            self.table.failed(parked, SessionStopped(runtime.why_offline))
        elif self.draining:
            why = f"the session of {runtime.profile!r} is being stopped: it takes no more sends"
            self.table.failed(parked, SessionStopped(why))
        elif runtime.offline is not None:
            runtime.offline.send(parked)
        else:
            self.senders.push(parked)
        return parked

    def relay(self, parked: Parked) -> None:
        """Write a send that is through all steps, now or when it is its turn."""
        parked.stage = "relay"
        if parked.outcome is not None:
            return
        link = self._runtime.link
        if link is None or self.outbox or not link.may_send:
            self.queue(parked)
        else:
            link.send(parked)

    def queue(self, parked: Parked) -> None:
        """Let a send wait for its turn or for a link, or fail it."""
        core = self._runtime.core
        waits = core.restarting or (parked.hold and core.machine.phase == "connecting")
        if not (core.online or waits):
            self.table.failed(parked, NotConnected(self._runtime.why_offline))
            return
        self.outbox.append(parked)
        if len(self.outbox) > 2 * len(self.table) + 16:
            self.sweep()

    def sweep(self) -> None:
        """Drop what waits for its turn and has been settled otherwise."""
        if self.outbox:
            self.outbox = [each for each in self.outbox if each.outcome is None]

    def over(self, reason: SessionError) -> None:
        """Fail every send, and end the work on all of them."""
        self.senders.stop()
        self.table.over(reason)
        self.outbox.clear()
        self._set_timer(None)

    async def drain(self, timeout: float) -> None:
        """Take no more sends, and give those under way this long to be settled."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._runtime.until(lambda: self._runtime.core.stopped or not self.table)

    @property
    def has_room(self) -> bool:
        """Whether one more send may be under way."""
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
