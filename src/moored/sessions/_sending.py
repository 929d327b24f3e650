"""The sending half of a session: each call becomes a parked send, which is settled once."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ._acks import AckTable, Parked
from ._checks import check_loop, check_texts, check_timeout
from ._core import SessionCore
from ._counts import Counts
from ._errors import NotConnected, SessionStopped
from ._features import AnyHow, Features
from ._outcomes import Acked, NotSent, Outcome, Rejected, Unknown, error_of
from ._protocol import Outgoing
from ._senders import LIMIT, Senders

if TYPE_CHECKING:
    from ._connection import Connection
    from ._offline import Offline
    from ._sessions import Sessions

__all__ = ["Sending"]


class Sending(Features):
    """What a session does with its sends."""

    __slots__ = ("_outbox", "_timer")

    _connection: Connection | None
    _core: SessionCore
    _counts: Counts
    _offline: Offline | None
    _outbox: list[Parked]
    _owner: Sessions
    _senders: Senders
    _table: AckTable
    _timer: asyncio.TimerHandle | None

    @abstractmethod
    def _why_offline(self) -> str:
        """Where the session is, and why, in words."""

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
        :param timeout: how long to wait for the confirmation; more than 0.
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

    async def _send(self, recipient: str, content: Any, **how: Unpack[AnyHow]) -> Outcome:
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
        check_texts(recipient=recipient, id=id or "")
        check_timeout(timeout)
        loop = asyncio.get_running_loop()
        check_loop(loop, self._owner._loop)
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
            self._offline.send(parked)
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
