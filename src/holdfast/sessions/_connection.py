"""The connection of a session: one link after another, for one life in the session's tree.

It does what the core says: dials, greets, waits, and dials again. Everything that comes in carries
the link that it came over; what an old one says is counted and dropped. A defect, in the protocol
or here, ends this life: all sends that are under way are settled at once, and the supervisor starts
another one, which connects by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.kernel import Context, describe
from holdfast.leases import LeaseRefused, StoreUnavailable

from ._acks import Parked
from ._content import Event
from ._core import Dial, Wait
from ._errors import (
    LinkLost,
    NotConnected,
    ProtocolError,
    QueryTimeout,
    SessionError,
    StepFailed,
    StorageError,
)
from ._keepalive import Keepalive, Verdict
from ._protocol import (
    Accepted,
    Answered,
    CloseClass,
    Closing,
    Confirmed,
    ConfirmedUpTo,
    Dialogue,
    Greeting,
    Happening,
    LoginStep,
    Progress,
    Ready,
    Refused,
    Repeat,
    Unhandled,
)
from ._queries import Queries
from ._retry_cache import RetryCache
from ._transport import Transport

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["Connection"]

log = logging.getLogger("holdfast.sessions")

#: How long a login may wait for somebody.
LOGIN_TIMEOUT = 300.0
#: The most bytes of answers to a server that takes nothing.
MOST_ANSWERS = 256 * 1024
#: The event that a kind of frame becomes; any other kind is the event's own name.
EVENTS = {
    "message": "messages_upsert",
    "receipt": "receipt_update",
    "group": "group_update",
    "presence": "presence_update",
}


class Link:
    """One socket, from its dial to its end: what it says is told to its connection."""

    __slots__ = ("_connection", "_early", "generation", "transport")

    def __init__(self, connection: Connection, generation: int) -> None:
        self._connection = connection
        # What it said before its dial has returned.
        self._early: list[Callable[[], None]] | None = []
        self.generation = generation
        self.transport: Transport | None = None

    def received(self, data: bytes) -> None:
        """Bytes have come in."""
        if self._early is None:
            self._connection.received(self, data)
        else:
            self._early.append(lambda: self._connection.received(self, data))

    def lost(self, error: BaseException | None) -> None:
        """It is over."""
        if self._early is None:
            self._connection.lost(self, error)
        else:
            self._early.append(lambda: self._connection.lost(self, error))

    def listen(self) -> None:
        """From now on it is heard."""
        early, self._early = self._early, None
        for each in early or ():
            each()


class Connection:
    """One life of a session's connection."""

    __slots__ = (
        "_again",
        "_answers",
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
        "_unconfirmed",
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
        self._window: int | None = None
        # Bytes of answers since the server was last seen to take everything.
        self._answers = 0
        # Written over this link, and not confirmed or refused yet.
        self._unconfirmed: set[str] = set()
        # Those of them that were written once more with the same id, which has two answers.
        self._again: list[str] = []

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
            raise
        except BaseException as error:
            self._end_link(abort=True)
            session._crashed(error)
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
            self.abandon(str(error), final=True)
        except (OSError, StoreUnavailable, StorageError, ProtocolError) as error:
            self._over(generation, describe(error))
        except SessionError as error:
            session._core.refuse(CloseClass.MISCONFIGURED, describe(error))
            self.abandon(describe(error), final=True)
        except Exception as error:
            self._crash(error)
        finally:
            if self._dialling is asyncio.current_task():
                self._dialling = self._greeted = None

    async def _open(self, generation: int) -> None:
        session = self._session
        link = Link(self, generation)
        dialogue = session.protocol.begin(session.profile, session._credentials, session._memory)
        transport = await session.protocol.endpoint.dial(link)
        link.transport = transport
        if not session._core.dialled(generation):
            transport.abort()
            self._greet(True)
            return
        self._link, self._dialogue = link, dialogue
        self._unconfirmed.clear()
        self._again.clear()
        self._answers = 0
        self._window = None
        session._table.linked(cumulative=session.protocol.cumulative)
        self._say(dialogue.hello())
        link.listen()

    def _over(self, generation: int, reason: str) -> None:
        """A dial has failed."""
        session = self._session
        if session._core.lost(generation, CloseClass.TRANSIENT, reason, self._now()):
            self._end_link(abort=True)
            self._settle(LinkLost(reason))

    # -- what a link says ----------------------------------------------------------------------

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come in over a link."""
        session = self._session
        if link is not self._link:
            session._counts.stale += 1
            return
        if self._keepalive is not None:
            self._keepalive.heard_at = self._loop.time()
        dialogue = self._dialogue
        assert dialogue is not None
        try:
            for event in dialogue.feed(data):
                _HANDLERS[type(event)](self, event)
                if self._link is not link:
                    return
        except ProtocolError as error:
            self._say(error.farewell)
            self._close(CloseClass.TRANSIENT, f"the server has broken the rules: {error}")
        except Exception as error:
            self._crash(error)

    def lost(self, link: Link, error: BaseException | None) -> None:
        """A link is over."""
        if link is not self._link:
            return
        why = "the server has closed it" if error is None else describe(error)
        self._close(CloseClass.TRANSIENT, why)

    def _on_ready(self, event: Ready) -> None:
        session, link = self._session, self._link
        assert link is not None
        now = self._now()
        if not session._core.ready(link.generation, now):
            return
        self._window = event.window
        if event.resumed:
            self._resume(link.generation)
        else:
            self._repeat()
        self._watch(event.keepalive)
        self._greet(True)
        session._changed()
        self.flush()

    def _resume(self, generation: int) -> None:
        assert self._dialogue is not None
        ids = []
        for id, data in self._dialogue.resend():
            ids.append(id)
            self._wrote(id)
            self._say(data)
        self._session._table.resumed(ids, generation)
        # What the old link had and this one did not write again will never be told.
        self._repeat()

    def _repeat(self) -> None:
        lost = LinkLost(f"the server has forgotten the link: {self._session._core.last_reason}")
        repeat = self._session._table.forgotten(lost)
        self._session._outbox[:0] = repeat

    def _on_login(self, event: LoginStep) -> None:
        session, link = self._session, self._link
        assert link is not None
        if session._core.login(link.generation, event.kind):
            self._greet(False)
            session._emit("login", event)
            session._changed()

    def _greet(self, done: bool) -> None:
        if self._greeted is not None and not self._greeted.done():
            self._greeted.set_result(done)

    def _on_accepted(self, event: Accepted) -> None:
        self._session._keep_credentials(event.credentials)

    def _on_confirmed(self, event: Confirmed) -> None:
        link, session = self._link, self._session
        self._answered(event.id)
        session._table.confirmed(event.id, event.extra, link.generation)  # type: ignore[union-attr]
        if session._outbox:
            self.flush()

    def _on_confirmed_up_to(self, event: ConfirmedUpTo) -> None:
        link, session = self._link, self._session
        assert link is not None
        confirmed = session._table.confirmed_up_to(event.count, link.generation)
        for id in confirmed:
            self._answered(id)
        self.flush()

    def _on_refused(self, event: Refused) -> None:
        link, session = self._link, self._session
        assert link is not None
        self._answered(event.id)
        session._table.refused(event.id, event.code, event.reason, link.generation)
        self.flush()

    def _on_answered(self, event: Answered) -> None:
        self.queries.answered(event.id, event.value, event.code)

    def _on_happening(self, event: Happening) -> None:
        session, link = self._session, self._link
        assert link is not None
        tag = session.protocol.route(event.frame)
        if tag == "unhandled":
            self._unhandled(type(event.frame).__name__)
            return
        session._counts.received += 1
        data = session.protocol.interpret(tag, event.frame)
        done = None if event.token is None else partial(self._acknowledge, link, event.token)
        if data is None:
            if done is not None:
                done(True)
        else:
            told = Event(EVENTS.get(tag, tag), data, session.profile)
            if not session._sink.put(told, done) and done is not None:
                done(False)

    def _acknowledge(self, link: Link, token: Any, handled: bool) -> None:
        # Over another link the server would not know what is meant: it sends it again instead.
        if link is not self._link or self._dialogue is None:
            return
        if handled:
            self._say(self._dialogue.acknowledge(token))
        elif self._session.protocol.acknowledges_in_order:
            # Nothing after it could be acknowledged any more, until the server sends it again.
            self._say(self._dialogue.goodbye())
            self._close(
                CloseClass.TRANSIENT, "something was not handled: a new link brings it again"
            )

    def _on_closing(self, event: Closing) -> None:
        self._say(event.farewell)
        reason = event.reason or event.kind.value
        if event.code is not None:
            reason = f"{reason} ({str(event.code)[:200]})"
        self._close(event.kind, reason, event.retry_after)

    def _on_greeting(self, event: Greeting) -> None:
        self._say(event.data)
        self._answers += len(event.data)
        if self._answers > MOST_ANSWERS:
            link = self._link
            assert link is not None
            if link.transport is not None and link.transport.pending:
                self._close(CloseClass.TRANSIENT, "the server asks, and takes no answers")
            else:
                self._answers = 0

    def _on_progress(self, event: Progress) -> None:
        """It has been heard: that is all."""

    def _on_repeat(self, event: Repeat) -> None:
        found = None if self._recent is None else self._recent.get(event.id)
        if found is None or self._dialogue is None:
            self._session._counts.not_repeated += 1
            return
        try:
            data = self._dialogue.write(found)
        except StepFailed:
            self._session._counts.not_repeated += 1
            return
        self._session._counts.repeated += 1
        self._say(data)

    def _on_unhandled(self, event: Unhandled) -> None:
        self._unhandled(event.what)

    def _unhandled(self, what: str) -> None:
        self._session._counts.unhandled += 1
        log.warning("a frame that nobody handles: %s", what)

    # -- saying things -------------------------------------------------------------------------

    def relay(self, parked: Parked) -> None:
        """Write a send, now or when it is its turn."""
        session = self._session
        if session._outbox or not self._may_write():
            session._queue(parked)
        else:
            self._write(parked)

    def _may_write(self) -> bool:
        return self._session._core.online and (
            self._window is None or len(self._unconfirmed) + len(self._again) < self._window
        )

    def _wrote(self, id: str) -> None:
        if id in self._unconfirmed:
            self._again.append(id)
        else:
            self._unconfirmed.add(id)

    def _answered(self, id: str) -> None:
        if id in self._again:
            self._again.remove(id)
        else:
            self._unconfirmed.discard(id)

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
        self._wrote(parked.outgoing.id)
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
            self._say(self._dialogue.ping())
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
            self._say(self._dialogue.goodbye())
            self._push()
        self._end_link()
        self._settle(LinkLost(reason), final=True)

    def abandon(self, reason: str, *, final: bool) -> None:
        """Not one byte more."""
        if self._dialling is not None and self._dialling is not asyncio.current_task():
            self._dialling.cancel()
        self._out = []
        self._end_link(abort=True)
        self._settle(LinkLost(reason), final=final)

    def _end_link(self, *, abort: bool = False) -> None:
        link, self._link = self._link, None
        self._dialogue = self._keepalive = None
        self._out = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if link is not None and link.transport is not None:
            link.transport.abort() if abort else link.transport.close()
        self._greet(True)

    def _settle(self, reason: LinkLost, *, final: bool = False) -> None:
        """Everybody who waits for the link is told."""
        session = self._session
        if final:
            session._table.over(reason)
        else:
            session._table.lost(reason, resumes=session.protocol.resumes)
        if session._outbox:
            session._sweep()
        self.queries.lost(str(reason))
        session._changed()
        self.poke()


_HANDLERS: dict[type, Any] = {
    Ready: Connection._on_ready,
    LoginStep: Connection._on_login,
    Accepted: Connection._on_accepted,
    Confirmed: Connection._on_confirmed,
    ConfirmedUpTo: Connection._on_confirmed_up_to,
    Refused: Connection._on_refused,
    Answered: Connection._on_answered,
    Happening: Connection._on_happening,
    Closing: Connection._on_closing,
    Greeting: Connection._on_greeting,
    Progress: Connection._on_progress,
    Repeat: Connection._on_repeat,
    Unhandled: Connection._on_unhandled,
}
