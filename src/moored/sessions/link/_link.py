"""One link of a session, from its dial to its end: its transport and its dialogue.

It has one method for each kind of event that the dialogue reports. A link ends once: bytes that its
transport reports after that are counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
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

#: The most bytes of replies that are buffered for a server that does not read.
MOST_ANSWERS = 256 * 1024
#: Seconds until a renewal of the link, postponed because of sends in flight, is tried again.
RENEWAL_RETRY = 0.5
#: The number of unhandled frames of a session that are each logged.
MOST_LOGGED = 100
#: The type of event for a tag of `Protocol.route`; any other tag is itself the type.
EVENTS = {
    "message": "messages_upsert",
    "receipt": "receipt_update",
    "group": "group_update",
    "presence": "presence_update",
}


@dataclass(slots=True, eq=False, repr=False)
class Link:
    """One link of a session; the receiver of its transport."""

    _runtime: SessionRuntime
    _connection: Connection
    generation: int
    dialogue: Dialogue
    transport: Transport | None = None
    #: Whether the session has ended the link, and whether its socket is closed.
    ended: bool = False
    over: bool = False
    # Callbacks of the transport that came before its dial returned.
    _early: list[Callable[[], None]] | None = field(default_factory=list)
    # The bytes to write at the end of this turn of the loop.
    _out: list[bytes] | None = None
    #: The keepalive, once the link is ready.
    keepalive: Keepalive | None = None
    # For the next check of it. (A handle of its own: named timers take more memory.)
    _timer: asyncio.TimerHandle | None = None
    window: Window = field(default_factory=Window)
    # Bytes of replies since the send buffer was last empty.
    _answers: int = 0
    # Whether a message arrived for which the event queue had no room.
    _full: bool = False
    #: Whether the server keeps the state of this link when it ends.
    keeps: bool = True

    # -- called by the transport ---------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Handle received bytes."""
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
            self._close(CloseClass.TRANSIENT, f"the server violated the protocol: {error}")
        except Exception as error:
            self._connection.crash(error)

    def heard(self) -> None:
        """Note that the server is alive: a message, or a part of one, has arrived."""
        if self.keepalive is not None:
            self.keepalive.received_at = self._runtime.clock.monotonic()

    def lost(self, error: BaseException | None) -> None:
        """End the link: its socket is closed."""
        self.over = True
        if self._early is not None:
            self._early.append(partial(self.lost, error))
        elif self.ended:
            self._runtime.closing_links.lost(self)
        else:
            why = "the server has closed the connection" if error is None else describe(error)
            self._close(CloseClass.TRANSIENT, why)

    def listen(self) -> None:
        """Handle what the transport has reported so far, and everything from now on."""
        early, self._early = self._early, None
        for each in early or ():
            each()

    def _close(self, kind: CloseClass, reason: str, retry_after: float | None = None) -> None:
        self._connection.close(kind, reason, retry_after)

    def end(self, *, abort: bool) -> None:
        """Flush and close the transport, or abort it."""
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
        """Write queued sends, as far as the window allows."""
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
            # Nothing was written: it is an error of the last step.
            sends.senders.crashed(outgoing.recipient, error)
            return
        sends.table.written(parked, self.generation)
        if self._connection.recent is not None:
            self._connection.recent.put(outgoing.id, outgoing)
        self.window.wrote(outgoing.id)
        self.say(data)

    def say(self, data: bytes) -> None:
        """Write bytes; all bytes of one turn of the loop are written together."""
        if data and self._out is not None:
            self._out.append(data)
        elif data:
            self._out = [data]
            asyncio.get_running_loop().call_soon(self.push)

    def push(self) -> None:
        """Write the bytes of this turn of the loop to the transport."""
        out, self._out = self._out, None
        transport = self.transport
        if not out or self.ended or transport is None or not self._runtime.may_write():
            return
        if self.keepalive is not None:
            self.keepalive.sent_at = self._runtime.clock.monotonic()
        if transport.keeps_bounds:
            for data in out:
                transport.write(data)
        else:
            transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def pending(self) -> int:
        """The number of bytes in the transport's send buffer."""
        return 0 if self.transport is None else self.transport.pending

    # -- keepalive -----------------------------------------------------------------------------

    def _start_keepalive(self, interval: float | None) -> None:
        protocol, clock = self._runtime.protocol, self._runtime.clock
        every = protocol.keepalive if interval is None else interval
        if every:
            every *= 0.9 + 0.1 * clock.random.random()
            self.keepalive = Keepalive(every, protocol.patience, clock.monotonic())
            self._check_keepalive()

    def _check_keepalive(self) -> None:
        assert self.keepalive is not None
        step, again = self.keepalive.check(self._runtime.clock.monotonic(), self.pending)
        if step is KeepaliveStep.LOST:
            patience = self._runtime.protocol.patience
            self._close(CloseClass.TRANSIENT, f"no answer to a ping within {patience:g} s")
            return
        if step is KeepaliveStep.PING:
            try:
                self.say(self.dialogue.ping())
            except Exception as error:
                self._connection.crash(error)
                return
        self._timer = asyncio.get_running_loop().call_at(again, self._check_keepalive)

    # -- events of the dialogue ----------------------------------------------------------------

    def _on_start_tls(self, event: StartTls) -> None:
        if not self._waits_for_tls():
            text = "the protocol uses STARTTLS: pass a Tcp endpoint with tls= and starttls=True"
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
            raise ProtocolError("no STARTTLS before the login, and the endpoint has starttls=True")
        if not runtime.core.ready(self.generation, runtime.clock.monotonic()):
            return
        runtime.credentials.worked()
        self.window.resize(event.window)
        self.keeps = event.keeps
        if event.resumed:
            self._resume()
        else:
            self._repeat()
        self._start_keepalive(event.keepalive)
        self._connection.greet(True)
        runtime.changed()
        # After `changed`: messages of the last link may fill the event queue.
        again = event.resumed or runtime.protocol.redelivers == "always"
        runtime.sink.link_ready(again=again, keeps=event.keeps)
        self.flush()

    def _resume(self) -> None:
        table, ids = self._runtime.sends.table, []
        for id, data in self.dialogue.resend({each.id for each in table if each.orphan}):
            if data is None:
                table.give_up(id, self._runtime.core.last_reason)
                continue
            ids.append(id)
            self.window.wrote(id)
            if data:
                self.say(data)
            else:
                self.window.drain()
        table.resumed(ids, self.generation)
        # The server never reports the outcome of sends that were not written again.
        self._repeat()

    def _repeat(self) -> None:
        runtime = self._runtime
        lost = LinkLost(f"the server has not kept the session: {runtime.core.last_reason}")
        runtime.sends.outbox[:0] = runtime.sends.table.forgotten(lost)

    def _on_login(self, event: LoginStep) -> None:
        if self._runtime.core.login(self.generation, event.kind):
            self._connection.greet(False)
            self._runtime.emit("login", event)
            self._runtime.changed()

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
            incoming = Incoming(EVENTS.get(tag, tag), data, runtime.profile)
            put = runtime.sink.put(incoming, done, event.key, again=event.again, raw=True)
            if put or done is None:
                return
            if protocol.acknowledges_in_order and not runtime.sink.closed:
                # The server sends it again over the next link, after the queued ones are handled.
                self._full = True
            else:
                done(False)

    def _unreadable(self, kind: str, error: Exception, done: Done | None) -> None:
        """Set aside a frame that the protocol cannot interpret, and go on with the next."""
        runtime = self._runtime
        # Without the error's text, which may quote a message.
        text = f"a frame could not be interpreted: {type(error).__name__}"
        runtime.record(text, kind="failure", cause=error)
        self._unhandled(text)
        runtime.sink.set_aside(Incoming(kind, None, runtime.profile), error, done)

    def _acknowledge(self, token: Any, handled: bool) -> bool:
        """Acknowledge a message, or skip it; return False if this link has ended."""
        # A token is not valid over another link: the server sends the message again instead.
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
            self._runtime.core.link.proven(self.generation)
            self._close(CloseClass.TRANSIENT, str(error))
            return True
        except Exception as error:
            self._connection.crash(error)
            return False
        if handled:
            self._runtime.core.link.proven(self.generation)
        # No later message can be acknowledged before the server has sent that one again.
        why = "the event queue was full: the server sends the rest over a new link"
        self._close(CloseClass.TRANSIENT, why)
        return True

    def _renew_later(self) -> None:
        """Schedule a new link, over which the server sends again what was set aside."""
        protocol, timers = self._runtime.protocol, self._runtime.owner._timers
        name = (self._runtime, "renewal")
        if name not in timers and protocol.redelivers != "never" and protocol.redelivery:
            due = self._runtime.clock.monotonic() + protocol.redelivery
            timers.set(name, due, partial(self._renew, due + protocol.redelivery))

    def _renew(self, latest: float) -> None:
        now = self._runtime.clock.monotonic()
        if self._runtime.sends.table and now < latest:
            # Postponed: the sends in flight might become `Unknown`.
            again = partial(self._renew, latest)
            name = (self._runtime, "renewal")
            self._runtime.owner._timers.set(name, now + RENEWAL_RETRY, again)
            return
        try:
            self.say(self.dialogue.goodbye())
        except Exception as error:
            self._connection.crash(error)
            return
        why = "messages were set aside: the server sends them again over a new link"
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
                why = "the send buffer is full: the server sends requests, but reads no replies"
                self._close(CloseClass.TRANSIENT, why)
            else:
                self._answers = 0

    def _on_repeat(self, event: Repeat) -> None:
        recent, runtime = self._connection.recent, self._runtime
        found = None if recent is None else recent.get(event.id)
        self.push()
        try:
            # Bounded: any peer may request a large send again and again.
            if found is None or self.pending > MOST_ANSWERS:
                raise StepFailed("it is not sent again")
            data = self.dialogue.write(found)
        except StepFailed:
            runtime.counts.not_repeated += 1
            return
        runtime.counts.repeated += 1
        runtime.sends.table.repeated(event.id)
        self.say(data)

    def _unhandled(self, what: str) -> None:
        counts = self._runtime.counts
        counts.unhandled += 1
        # A server that sends many must not fill the logs: then only the 128th, 256th, 512th …
        if counts.unhandled <= MOST_LOGGED or not counts.unhandled & (counts.unhandled - 1):
            text = "%s: the protocol does not handle a frame (%d so far): %s"
            what = self._runtime.credentials.hide(what)
            log.warning(text, self._runtime.name, counts.unhandled, what)


_HANDLERS: dict[type, Any] = {
    Ready: Link._on_ready,
    LoginStep: Link._on_login,
    Accepted: lambda link, event: link._runtime.credentials.keep(event.credentials),
    Confirmed: Link._on_confirmed,
    ConfirmedUpTo: Link._on_confirmed_up_to,
    Refused: Link._on_refused,
    Bounced: Link._on_bounced,
    Answered: Link._on_answered,
    Happening: Link._on_happening,
    Closing: Link._on_closing,
    Greeting: Link._on_greeting,
    Ignored: lambda link, event: None,
    Remember: lambda link, event: link._runtime.remember(event.data),
    Repeat: Link._on_repeat,
    StartTls: Link._on_start_tls,
    Unhandled: lambda link, event: link._unhandled(event.what),
}
