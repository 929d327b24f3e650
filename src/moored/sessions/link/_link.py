"""One link of a session, from its dial to its end: its transport, its dialogue, and what they say.

One method for each kind of event that the dialogue reports. A link ends once: what its transport
reports after that is counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from moored.kernel import describe

from .._content import Bounce, Incoming
from .._errors import LinkLost, ProtocolError, SessionError, StepFailed
from .._protocol import (
    Accepted,
    Answered,
    Bounced,
    CloseClass,
    Closing,
    Confirmed,
    ConfirmedUpTo,
    Dialogue,
    Greeting,
    Happening,
    Ignored,
    LoginStep,
    Ready,
    Refused,
    Remember,
    Repeat,
    StartTls,
    Unhandled,
)
from ..events import Done
from ..sending import Parked, Window
from ..transport import Stream, Transport
from ._keepalive import Keepalive, KeepaliveStep

if TYPE_CHECKING:
    from .._runtime import SessionRuntime
    from ._connection import Connection

__all__ = ["Link"]

log = logging.getLogger("moored.sessions")

#: The most bytes of answers to a server that takes nothing.
MOST_ANSWERS = 256 * 1024
#: Seconds until the next look for a moment without sends under way, to make a new link in.
RENEWAL_RETRY = 0.5
#: So many frames of a session that nobody handles are logged, each.
MOST_LOGGED = 100
#: The event that a kind of frame becomes; any other kind is the event's own name.
EVENTS = {
    "message": "messages_upsert",
    "receipt": "receipt_update",
    "group": "group_update",
    "presence": "presence_update",
}


class Link:
    """One link of a session; the receiver of its transport."""

    __slots__ = (
        "_answers",
        "_connection",
        "_early",
        "_full",
        "_out",
        "_runtime",
        "_timer",
        "dialogue",
        "ended",
        "generation",
        "keepalive",
        "keeps",
        "over",
        "transport",
        "window",
    )

    def __init__(
        self,
        runtime: SessionRuntime,
        connection: Connection,
        generation: int,
        dialogue: Dialogue,
    ) -> None:
        self._runtime = runtime
        self._connection = connection
        self.generation = generation
        self.dialogue = dialogue
        self.transport: Transport | None = None
        #: Whether the session has ended it, and whether its socket is gone.
        self.ended = self.over = False
        # What came in before its dial has returned.
        self._early: list[Callable[[], None]] | None = []
        # What is written at the end of this turn of the loop.
        self._out: list[bytes] | None = None
        #: The watch for signs of life, while there is one.
        self.keepalive: Keepalive | None = None
        # For the next look at it. (A handle of its own: named timers take more memory.)
        self._timer: asyncio.TimerHandle | None = None
        self.window = Window()
        # Bytes of answers since the server was last seen to take everything.
        self._answers = 0
        # Whether something came in that there was no room for.
        self._full = False
        #: Whether the server keeps what this link leaves unacknowledged.
        self.keeps = True

    # -- what its transport reports ------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Handle bytes that have come in."""
        if self._early is not None:
            self._early.append(partial(self.received, data))
            return
        if self.ended:
            self._runtime.counts.stale += 1
            return
        self.heard()
        try:
            for event in self.dialogue.feed(data):
                _HANDLERS[type(event)](self, event)
                if self.ended or type(event) is StartTls:
                    return
            self.say(self.dialogue.end_of_batch())
        except ProtocolError as error:
            self.say(error.farewell)
            self._close(CloseClass.TRANSIENT, f"the server has broken the rules: {error}")
        except Exception as error:
            self._connection.crash(error)

    def heard(self) -> None:
        """Note a sign of life: a message, or a part of one that is still on its way."""
        if self.keepalive is not None:
            self.keepalive.heard_at = self._runtime.clock.monotonic()

    def lost(self, error: BaseException | None) -> None:
        """End the link: its socket is gone."""
        self.over = True
        if self._early is not None:
            self._early.append(partial(self.lost, error))
        elif self.ended:
            self._runtime.closing_links.lost(self)
        else:
            why = "the server has closed it" if error is None else describe(error)
            self._close(CloseClass.TRANSIENT, why)

    def listen(self) -> None:
        """Handle what has come in so far, and what comes from now on."""
        early, self._early = self._early, None
        for each in early or ():
            each()

    def _close(self, kind: CloseClass, reason: str, retry_after: float | None = None) -> None:
        self._connection.close(kind, reason, retry_after)

    def end(self, *, abort: bool) -> None:
        """Close the transport after what was written, or abort it."""
        self.ended = True
        self.keepalive = None
        self._out = None
        if self._timer is not None:
            self._timer.cancel()
        self._runtime.owner._timers.cancel((self._runtime, "renewal"))
        if self.transport is None:
            return
        if abort:
            self.transport.abort()
        else:
            self.transport.close()
            self._runtime.closing_links.closed(self)

    # -- writing -------------------------------------------------------------------------------

    @property
    def may_send(self) -> bool:
        """Whether a send may be written now."""
        return self._runtime.core.online and self.window.is_open

    def flush(self) -> None:
        """Write the sends that wait for their turn."""
        sends = self._runtime.sends
        while sends.outbox and self.may_send:
            parked = sends.outbox.pop(0)
            if parked.outcome is None:
                self.send(parked)

    def send(self, parked: Parked) -> None:
        """Write a send."""
        runtime = self._runtime
        if not runtime.may_write():
            return
        sends, outgoing = runtime.sends, parked.outgoing
        try:
            data = self.dialogue.write(outgoing)
        except StepFailed as error:
            sends.table.failed(parked, error)
            return
        except Exception as error:
            # Nothing of it was written. It is the last step, and fails like any other.
            sends.senders.crashed(outgoing.recipient, error)
            return
        sends.table.written(parked, self.generation)
        if self._connection.recent is not None:
            self._connection.recent.put(outgoing.id, outgoing)
        self.window.wrote(outgoing.id)
        self.say(data)

    def say(self, data: bytes) -> None:
        """Write bytes; those of one turn of the loop go out together."""
        if data and self._out is not None:
            self._out.append(data)
        elif data:
            self._out = [data]
            asyncio.get_running_loop().call_soon(self.push)

    def push(self) -> None:
        """Write out what was said in this turn of the loop."""
        out, self._out = self._out, None
        transport = self.transport
        if not out or self.ended or transport is None or not self._runtime.may_write():
            return
        if self.keepalive is not None:
            self.keepalive.said_at = self._runtime.clock.monotonic()
        if transport.keeps_bounds:
            for data in out:
                transport.write(data)
        else:
            transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def pending(self) -> int:
        """How many bytes the server has not taken yet."""
        return 0 if self.transport is None else self.transport.pending

    # -- signs of life -------------------------------------------------------------------------

    def _watch(self, told: float | None) -> None:
        protocol, clock = self._runtime.protocol, self._runtime.clock
        every = protocol.keepalive if told is None else told
        if every:
            every *= 0.9 + 0.1 * clock.random.random()
            self.keepalive = Keepalive(every, protocol.patience, clock.monotonic())
            self._look()

    def _look(self) -> None:
        assert self.keepalive is not None
        step, again = self.keepalive.look(self._runtime.clock.monotonic(), self.pending)
        if step is KeepaliveStep.LOST:
            patience = self._runtime.protocol.patience
            self._close(CloseClass.TRANSIENT, f"no sign of life for {patience:g} s after a ping")
            return
        if step is KeepaliveStep.ASK:
            try:
                self.say(self.dialogue.ping())
            except Exception as error:
                self._connection.crash(error)
                return
        self._timer = asyncio.get_running_loop().call_at(again, self._look)

    # -- what its dialogue reports -------------------------------------------------------------

    def _on_start_tls(self, event: StartTls) -> None:
        if not self._waits_for_tls():
            text = "the protocol wants STARTTLS: give it a Tcp endpoint with tls= and starttls=True"
            raise SessionError(text)
        assert isinstance(self.transport, Stream)
        self.transport.pause()
        self._connection.greet(None)

    def _waits_for_tls(self) -> bool:
        wanted = getattr(self._connection.endpoint, "starttls", False)
        return wanted and isinstance(self.transport, Stream)

    def _on_ready(self, event: Ready) -> None:
        runtime = self._runtime
        if self._waits_for_tls():
            raise ProtocolError("the link is ready without TLS, and its endpoint has starttls=True")
        if not runtime.core.ready(self.generation, runtime.clock.monotonic()):
            return
        runtime.credentials.worked()
        self.window.resize(event.window)
        self.keeps = event.keeps
        if event.resumed:
            self._resume()
        else:
            self._repeat()
        self._watch(event.keepalive)
        self._connection.greet(True)
        runtime.changed()
        # After the news: what was put aside may take all the room that there is.
        again = event.resumed or runtime.protocol.redelivers == "always"
        runtime.sink.link_ready(again=again, keeps=event.keeps)
        self.flush()

    def _resume(self) -> None:
        table, ids = self._runtime.sends.table, []
        for id, data in self.dialogue.resend({each.id for each in table if each.orphan}):
            if data is None:
                table.put_aside(id, self._runtime.core.last_reason)
                continue
            ids.append(id)
            self.window.wrote(id)
            if data:
                self.say(data)
            else:
                self.window.drain()
        table.resumed(ids, self.generation)
        # What the old link had and this one did not write again will never be told.
        self._repeat()

    def _repeat(self) -> None:
        runtime = self._runtime
        lost = LinkLost(f"the server has forgotten the link: {runtime.core.last_reason}")
        runtime.sends.outbox[:0] = runtime.sends.table.forgotten(lost)

    def _on_login(self, event: LoginStep) -> None:
        if self._runtime.core.login(self.generation, event.kind):
            self._connection.greet(False)
            self._runtime.emit("login", event)
            self._runtime.changed()

    def _on_accepted(self, event: Accepted) -> None:
        self._runtime.credentials.keep(event.credentials)

    def _on_confirmed(self, event: Confirmed) -> None:
        self.window.answered(event.id)
        self._runtime.sends.table.confirmed(event.id, event.extra, self.generation)
        self.flush()

    def _on_confirmed_up_to(self, event: ConfirmedUpTo) -> None:
        for id in self._runtime.sends.table.confirmed_up_to(event.count, self.generation):
            self.window.answered(id)
        self.flush()

    def _on_refused(self, event: Refused | Bounced) -> None:
        self.window.answered(event.id)
        table, reason = self._runtime.sends.table, self._runtime.credentials.hide(event.reason)
        table.refused(event.id, event.code, reason, self.generation)
        self.flush()

    def _on_bounced(self, event: Bounced) -> None:
        runtime = self._runtime
        if event.id in runtime.sends.table:
            self._on_refused(event)
            return
        runtime.counts.bounced += 1
        reason = runtime.credentials.hide(event.reason)
        runtime.emit("send_bounced", Bounce(event.id, event.code, reason))

    def _on_answered(self, event: Answered) -> None:
        code = event.code
        if isinstance(code, str):
            code = self._runtime.credentials.hide(code)
        self._connection.queries.answered(event.id, event.value, code)

    def _on_happening(self, event: Happening) -> None:
        runtime, protocol = self._runtime, self._runtime.protocol
        done = None if event.token is None else partial(self._acknowledge, event.token)
        tag = "unknown"
        try:
            tag = protocol.route(event.frame)
            data = None if tag == "unhandled" else protocol.interpret(tag, event.frame)
        except Exception as error:
            self._unreadable(EVENTS.get(tag, tag), error, done)
            return
        if tag == "unhandled":
            self._unhandled(type(event.frame).__name__)
            return
        runtime.counts.received += 1
        if data is None:
            if done is not None:
                done(True)
        elif done is None or not self._full:
            told = Incoming(EVENTS.get(tag, tag), data, runtime.profile)
            put = runtime.sink.put(told, done, event.key, again=event.again, raw=True)
            if put or done is None:
                return
            if protocol.acknowledges_in_order and not runtime.sink.closed:
                # It comes again over the next link; first, all that has room is handled.
                self._full = True
            else:
                done(False)

    def _unreadable(self, kind: str, error: Exception, done: Done | None) -> None:
        """The protocol cannot interpret one frame: set that aside, and go on with the next."""
        runtime = self._runtime
        # Not its words: they may be a message's.
        text = f"a frame could not be interpreted: {type(error).__name__}"
        runtime.record(text, kind="failure", cause=error)
        self._unhandled(text)
        runtime.sink.set_aside(Incoming(kind, None, runtime.profile), error, done)

    def _acknowledge(self, token: Any, handled: bool) -> bool:
        """Tell the server; says whether this link is still there to do it."""
        # Over another link the server would not know what is meant: it sends it again instead.
        if self.ended:
            return False
        try:
            if handled:
                self.say(self.dialogue.acknowledge(token))
            else:
                self.say(self.dialogue.skip(token))
                self._renew_later()
            if not self._full or self._runtime.sink.queue.owed:
                return True
            self.say(self.dialogue.goodbye())
        except ProtocolError as error:
            self.say(error.farewell)
            self._runtime.core.proven()
            self._close(CloseClass.TRANSIENT, str(error))
            return True
        except Exception as error:
            self._connection.crash(error)
            return False
        if handled:
            self._runtime.core.proven()
        # Nothing after it could be acknowledged any more, until the server sends it again.
        why = "more came than there was room for: a new link brings it again"
        self._close(CloseClass.TRANSIENT, why)
        return True

    def _renew_later(self) -> None:
        """Make a new link after a while: the server sends what was set aside over that one."""
        protocol, timers = self._runtime.protocol, self._runtime.owner._timers
        name = (self._runtime, "renewal")
        if name not in timers and protocol.redelivers != "never" and protocol.redelivery:
            due = self._runtime.clock.monotonic() + protocol.redelivery
            timers.set(name, due, partial(self._renew, due + protocol.redelivery))

    def _renew(self, latest: float) -> None:
        now = self._runtime.clock.monotonic()
        if self._runtime.sends.table and now < latest:
            # A new link may cost the sends that are under way their outcome.
            again = partial(self._renew, latest)
            name = (self._runtime, "renewal")
            self._runtime.owner._timers.set(name, now + RENEWAL_RETRY, again)
            return
        try:
            self.say(self.dialogue.goodbye())
        except Exception as error:
            self._connection.crash(error)
            return
        why = "messages were set aside: a new link brings them again"
        self._close(CloseClass.RESTART, why)

    def _on_closing(self, event: Closing) -> None:
        self.say(event.farewell)
        reason = event.reason or event.kind.value
        if event.code is not None:
            reason = f"{reason} ({str(event.code)[:200]})"
        kind = event.kind
        if kind is CloseClass.AUTHENTICATION and self._runtime.credentials.refused():
            kind = CloseClass.RESTART
        self._close(kind, reason, event.retry_after)

    def _on_greeting(self, event: Greeting) -> None:
        self.say(event.data)
        self._answers += len(event.data)
        if self._answers > MOST_ANSWERS:
            if self.pending:
                self._close(CloseClass.TRANSIENT, "the server asks, and takes no answers")
            else:
                self._answers = 0

    def _on_ignored(self, event: Ignored) -> None:
        """Do nothing: any bytes are a sign of life."""

    def _on_remember(self, event: Remember) -> None:
        self._runtime.remember(event.data)

    def _on_repeat(self, event: Repeat) -> None:
        recent, runtime = self._connection.recent, self._runtime
        found = None if recent is None else recent.get(event.id)
        self.push()
        try:
            # Any peer may ask: one small question has a large answer, again and again.
            if found is None or self.pending > MOST_ANSWERS:
                raise StepFailed("it is not repeated")
            data = self.dialogue.write(found)
        except StepFailed:
            runtime.counts.not_repeated += 1
            return
        runtime.counts.repeated += 1
        runtime.sends.table.repeated(event.id)
        self.say(data)

    def _on_unhandled(self, event: Unhandled) -> None:
        self._unhandled(event.what)

    def _unhandled(self, what: str) -> None:
        counts = self._runtime.counts
        counts.unhandled += 1
        # A server that says nothing else shall not fill the logs: from then on, at 128, 256, 512 …
        if counts.unhandled <= MOST_LOGGED or not counts.unhandled & (counts.unhandled - 1):
            text = "%s: the protocol does not handle a frame (%d so far): %s"
            what = self._runtime.credentials.hide(what)
            log.warning(text, self._runtime.name, counts.unhandled, what)


_HANDLERS: dict[type, Any] = {
    Ready: Link._on_ready,
    LoginStep: Link._on_login,
    Accepted: Link._on_accepted,
    Confirmed: Link._on_confirmed,
    ConfirmedUpTo: Link._on_confirmed_up_to,
    Refused: Link._on_refused,
    Bounced: Link._on_bounced,
    Answered: Link._on_answered,
    Happening: Link._on_happening,
    Closing: Link._on_closing,
    Greeting: Link._on_greeting,
    Ignored: Link._on_ignored,
    Remember: Link._on_remember,
    Repeat: Link._on_repeat,
    StartTls: Link._on_start_tls,
    Unhandled: Link._on_unhandled,
}
