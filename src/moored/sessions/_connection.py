"""The connection of a session: one link after another, for one life in the session's tree.

It does what the core says: dials, greets, waits, and dials again. Everything that comes in carries
the link that it came over; what an old one says is counted and dropped. A defect, in the protocol
or here, ends this life: all sends that are under way are settled at once, and the supervisor starts
another one, which connects by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from moored.kernel import Context, describe
from moored.leases import LeaseRefused, StoreUnavailable

from ._acks import Parked
from ._core import Dial, Wait
from ._errors import (
    LinkLost,
    NotConnected,
    ProtocolError,
    QueryFailed,
    QueryTimeout,
    SessionError,
    StepFailed,
    StorageError,
)
from ._hearing import MOST_ANSWERS, Hearing
from ._keepalive import Keepalive, Verdict
from ._link import Link
from ._protocol import CloseClass, Dialogue
from ._queries import Queries
from ._retry_cache import RetryCache
from ._window import Window

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["Connection"]

#: How long a login may wait for somebody.
LOGIN_TIMEOUT = 300.0


class Connection(Hearing):
    """One life of a session's connection."""

    __slots__ = (
        "_dialling",
        "_dialogue",
        "_error",
        "_flushing",
        "_greeted",
        "_keepalive",
        "_link",
        "_loop",
        "_out",
        "_poke",
        "_recent",
        "_session",
        "_timer",
        "_window",
        "queries",
    )

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self.queries = Queries()
        # There before anybody can ask, and gone with whatever has crashed.
        self._recent: RetryCache | None = None
        if session.protocol.repeats:
            self._recent = session._owner._retry_cache()
        self._link: Link | None = None
        self._dialogue: Dialogue | None = None
        self._poke: asyncio.Future[None] | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._greeted: asyncio.Future[bool] | None = None
        self._error: BaseException | None = None
        self._keepalive: Keepalive | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._out: list[bytes] = []
        self._flushing = False
        self._window = Window()
        # Bytes of answers since the server was last seen to take everything.
        self._answers = 0
        # Whether something came over this link that there was no room for.
        self._full = False
        # Whether the server keeps what this link leaves unacknowledged.
        self._keeps = True

    # -- its life ------------------------------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Have a link while the core wants one, until somebody cancels this."""
        session = self._session
        core = session._core
        session._connection = self
        ctx.started(session)
        try:
            while True:
                self._poke = self._loop.create_future()
                match core.next(self._now()):
                    case Dial(generation=generation):
                        self._dialling = self._loop.create_task(self._dial(generation))
                    case Wait(until=until):
                        self._set_timer(until, self.poke)
                await self._poke
                if self._error is not None:
                    raise self._error
        except asyncio.CancelledError:
            # For good, or because of another part, with which it is started again.
            core.crashed("the connection was stopped", self._now())
            self.disconnect("the connection was stopped")
            if self._error is not None:
                session._record("a defect at the end", kind="failure", cause=self._error)
            raise
        except BaseException as error:
            self._end_link(abort=True)
            session._crashed(error)
            self.queries.lost(f"the session has crashed: {describe(error)}")
            raise
        finally:
            if self._dialling is not None:
                self._dialling.cancel()
            session._connection = None

    def poke(self) -> None:
        """Something has changed: look at the core again."""
        if self._poke is not None and not self._poke.done():
            self._poke.set_result(None)

    def _crash(self, error: BaseException) -> None:
        self._error = error
        self.poke()

    def _now(self) -> float:
        return self._session._clock.monotonic()

    # -- making a link -------------------------------------------------------------------------

    async def _dial(self, generation: int) -> None:
        session = self._session
        try:
            # Many wait for their turn here, and that is not the server's fault.
            await session._before_dial()
            async with asyncio.timeout(session._connect_timeout) as limit:
                self._greeted = self._loop.create_future()
                await self._open(generation)
                while not await self._greeted:
                    # The login needs somebody, who needs time.
                    self._greeted = self._loop.create_future()
                    limit.reschedule(self._loop.time() + LOGIN_TIMEOUT)
        except TimeoutError:
            self._over(generation, f"{session.protocol.endpoint} has not answered in time")
        except LeaseRefused as error:
            session._core.refuse(CloseClass.TAKEOVER, str(error))
            self.abandon(str(error))
        except (OSError, StoreUnavailable, StorageError, ProtocolError) as error:
            self._over(generation, describe(error))
        except SessionError as error:
            session._core.refuse(CloseClass.MISCONFIGURED, describe(error))
            self.abandon(describe(error))
        except Exception as error:
            self._crash(error)
        finally:
            if self._dialling is asyncio.current_task():
                self._dialling = self._greeted = None

    async def _open(self, generation: int) -> None:
        session = self._session
        if session._offline is not None:
            session._offline.open(generation)
            self._greet(True)
            return
        # It has had its time, and there is never more than one.
        session._parting.abort()
        link = Link(self, generation)
        dialogue = session.protocol.begin(session.profile, session._credentials, session._memory)
        transport = await session.protocol.endpoint.dial(link)
        link.transport = transport
        if not session._core.dialled(generation):
            transport.abort()
            self._greet(True)
            return
        self._link, self._dialogue = link, dialogue
        self._window.reset()
        self._answers = 0
        self._full = False
        session._table.linked(cumulative=session.protocol.cumulative)
        self._say(dialogue.hello())
        link.listen()

    def _over(self, generation: int, reason: str) -> None:
        """A dial has failed."""
        session = self._session
        if session._core.lost(generation, CloseClass.TRANSIENT, reason, self._now()):
            self._end_link(abort=True)
            self._settle(LinkLost(reason))

    # -- saying things -------------------------------------------------------------------------

    def relay(self, parked: Parked) -> None:
        """Write a send, now or when it is its turn."""
        session = self._session
        if session._outbox or not self._may_write():
            session._queue(parked)
        else:
            self._write(parked)

    def _may_write(self) -> bool:
        return self._session._core.online and self._window.is_open

    def flush(self) -> None:
        """Write what waits for its turn."""
        outbox = self._session._outbox
        while outbox and self._may_write():
            parked = outbox.pop(0)
            if parked.outcome is None:
                self._write(parked)

    def _write(self, parked: Parked) -> None:
        session = self._session
        if session._lease is not None and not session._lease.live:
            session._fenced()
            return
        assert self._dialogue is not None
        assert self._link is not None
        try:
            data = self._dialogue.write(parked.outgoing)
        except StepFailed as error:
            session._table.failed(parked, error)
            return
        except Exception as error:
            # Nothing of it was written. It is the last step, and fails like any other.
            session._senders.crashed(parked.outgoing.recipient, error)
            return
        session._table.written(parked, self._link.generation)
        if self._recent is not None:
            self._recent.put(parked.id, parked.outgoing)
        self._window.wrote(parked.outgoing.id)
        self._say(data)

    def _say(self, data: bytes) -> None:
        # What is said in one turn of the loop goes out together.
        if data:
            self._out.append(data)
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._push)

    def _push(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        link, session = self._link, self._session
        if not out or link is None or link.transport is None:
            return
        if session._lease is not None and not session._lease.live:
            session._fenced()
            return
        if self._keepalive is not None:
            self._keepalive.said_at = self._loop.time()
        link.transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _unsent(self) -> int:
        self._push()
        link = self._link
        return 0 if link is None or link.transport is None else link.transport.pending

    async def ask(self, question: Any, timeout: float) -> Any:
        """Ask the server something, and wait for its answer."""
        session, link = self._session, self._link
        if link is None or self._dialogue is None or not session._core.is_linked(link.generation):
            raise NotConnected(session._why_offline())
        id, future = self.queries.ask(link.generation)
        try:
            self._say(self._dialogue.query(id, question))
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise QueryTimeout(f"the server has not answered within {timeout:g} s") from None
        finally:
            self.queries.forget(id)

    def tell(self, data: Any) -> None:
        """Say something that the server does not answer."""
        session, link = self._session, self._link
        if link is None or self._dialogue is None or not session._core.online:
            raise NotConnected(session._why_offline())
        if link.transport is not None and link.transport.pending > MOST_ANSWERS:
            raise QueryFailed("the server takes nothing just now: say less, or later")
        self._say(self._dialogue.notice(data))

    def answer_login(self, answer: Any) -> None:
        """Tell the server what the user said."""
        if self._session._core.machine.step != "login" or self._dialogue is None:
            raise NotConnected("no login waits for an answer")
        self._say(self._dialogue.login(answer))

    # -- signs of life -------------------------------------------------------------------------

    def _watch(self, told: float | None) -> None:
        protocol = self._session.protocol
        every = protocol.keepalive if told is None else told
        if every:
            spread = 0.9 + 0.1 * self._session._clock.random.random()
            self._keepalive = Keepalive(every * spread, protocol.patience, self._loop.time())
            self._look()

    def _look(self) -> None:
        if self._keepalive is None or self._dialogue is None:
            return
        link = self._link
        pending = link.transport.pending if link is not None and link.transport is not None else 0
        verdict, again = self._keepalive.look(self._loop.time(), pending)
        if verdict is Verdict.LOST:
            patience = self._session.protocol.patience
            self._close(CloseClass.TRANSIENT, f"no sign of life for {patience:g} s after a ping")
            return
        if verdict is Verdict.ASK:
            try:
                self._say(self._dialogue.ping())
            except Exception as error:
                self._crash(error)
                return
        self._set_timer(again, self._look)

    def _set_timer(self, when: float, act: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, act)

    # -- ends ----------------------------------------------------------------------------------

    def _close(self, kind: CloseClass, reason: str, retry_after: float | None = None) -> None:
        """The link is over, whoever ended it."""
        link = self._link
        if link is None:
            return
        self._push()
        current = self._session._core.lost(link.generation, kind, reason, self._now(), retry_after)
        self._end_link()
        if current:
            self._settle(LinkLost(f"the link was lost: {reason}"), final=kind.final)

    def disconnect(self, reason: str) -> None:
        """Take leave of the server, and have no link."""
        if self._dialling is not None:
            self._dialling.cancel()
        if self._link is not None and self._dialogue is not None:
            try:
                self._say(self._dialogue.goodbye())
            except Exception as error:
                self._crash(error)
            self._push()
        self._end_link()
        self._settle(LinkLost(reason), final=True)

    def abandon(self, reason: str) -> None:
        """Not one byte more."""
        if self._dialling is not None and self._dialling is not asyncio.current_task():
            self._dialling.cancel()
        self._out = []
        self._end_link(abort=True)
        self._settle(LinkLost(reason), final=True)

    def _end_link(self, *, abort: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._session._sink.link_lost()
        self._dialogue = self._keepalive = None
        self._out = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if link is not None and link.transport is not None:
            if abort:
                link.transport.abort()
            else:
                link.transport.close()
                self._session._parting.closed(link)
        self._greet(True)

    def _settle(self, reason: LinkLost, *, final: bool = False) -> None:
        """Everybody who waits for the link is told."""
        session = self._session
        if final or session._core.machine.phase == "offline":
            session._table.over(reason)
        else:
            session._table.lost(reason, resumes=session.protocol.resumes and self._keeps)
        if session._outbox:
            session._sweep()
        self.queries.lost(str(reason))
        session._changed()
        self.poke()
