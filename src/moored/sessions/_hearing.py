"""What a connection does with what its link says: one method for each kind of event.

What an old link says is counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from moored.kernel import describe

from ._content import Event
from ._errors import LinkLost, ProtocolError, StepFailed
from ._keepalive import Keepalive
from ._link import Link
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
from ._window import Window

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["Hearing"]

log = logging.getLogger("moored.sessions")

#: The most bytes of answers to a server that takes nothing.
MOST_ANSWERS = 256 * 1024
#: So many frames of a session that nobody handles are logged, each.
MOST_LOGGED = 100
#: The event that a kind of frame becomes; any other kind is the event's own name.
EVENTS = {
    "message": "messages_upsert",
    "receipt": "receipt_update",
    "group": "group_update",
    "presence": "presence_update",
}


class Hearing(ABC):
    """The half of a connection that listens."""

    __slots__ = ("_answers", "_full", "_keeps")

    _session: Session
    _loop: asyncio.AbstractEventLoop
    _link: Link | None
    _dialogue: Dialogue | None
    _greeted: asyncio.Future[bool] | None
    _keepalive: Keepalive | None
    _recent: RetryCache | None
    _window: Window
    _answers: int
    _full: bool
    _keeps: bool
    queries: Queries

    # -- what the other half does --------------------------------------------------------------

    @abstractmethod
    def _say(self, data: bytes) -> None:
        """Send bytes."""

    @abstractmethod
    def _unsent(self) -> int:
        """How many bytes the server has not taken yet."""

    @abstractmethod
    def flush(self) -> None:
        """Write what waits for its turn."""

    @abstractmethod
    def _watch(self, told: float | None) -> None:
        """Look for signs of life from now on."""

    @abstractmethod
    def _close(self, kind: CloseClass, reason: str, retry_after: float | None = None) -> None:
        """The link is over, whoever ended it."""

    @abstractmethod
    def _crash(self, error: BaseException) -> None:
        """There is a defect: end this life."""

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

    def heard(self, link: Link) -> None:
        """A part of something has come in over a link: it lives."""
        if link is self._link and self._keepalive is not None:
            self._keepalive.heard_at = self._loop.time()

    def lost(self, link: Link, error: BaseException | None) -> None:
        """A link is over."""
        if link is not self._link:
            self._session._parting.lost(link)
            return
        why = "the server has closed it" if error is None else describe(error)
        self._close(CloseClass.TRANSIENT, why)

    def _on_ready(self, event: Ready) -> None:
        session, link = self._session, self._link
        assert link is not None
        if not session._core.ready(link.generation, session._clock.monotonic()):
            return
        self._window.resize(event.window)
        self._keeps = event.keeps
        if event.resumed:
            self._resume(link.generation)
        else:
            self._repeat()
        self._watch(event.keepalive)
        self._greet(True)
        session._changed()
        # After the news: what was put aside may take all the room that there is.
        again = event.resumed or session.protocol.redelivers == "always"
        session._sink.link_ready(again=again, keeps=event.keeps)
        self.flush()

    def _resume(self, generation: int) -> None:
        assert self._dialogue is not None
        ids = []
        for id, data in self._dialogue.resend():
            ids.append(id)
            self._window.wrote(id)
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
        self._window.answered(event.id)
        session._table.confirmed(event.id, event.extra, link.generation)  # type: ignore[union-attr]
        if session._outbox:
            self.flush()

    def _on_confirmed_up_to(self, event: ConfirmedUpTo) -> None:
        link, session = self._link, self._session
        assert link is not None
        confirmed = session._table.confirmed_up_to(event.count, link.generation)
        for id in confirmed:
            self._window.answered(id)
        self.flush()

    def _on_refused(self, event: Refused) -> None:
        link, session = self._link, self._session
        assert link is not None
        self._window.answered(event.id)
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
        elif done is None or not self._full:
            told = Event(EVENTS.get(tag, tag), data, session.profile)
            put = session._sink.put(told, done, event.key, again=event.again)
            if put or done is None:
                return
            if session.protocol.acknowledges_in_order and not session._sink._closed:
                # It comes again over the next link; first, all that has room is handled.
                self._full = True
            else:
                done(False)

    def _acknowledge(self, link: Link, token: Any, handled: bool) -> bool:
        """Tell the server; says whether this link is still there to do it."""
        # Over another link the server would not know what is meant: it sends it again instead.
        if link is not self._link or self._dialogue is None:
            return False
        try:
            if handled:
                self._say(self._dialogue.acknowledge(token))
                if not self._full or self._session._sink._owed:
                    return True
            elif not self._session.protocol.acknowledges_in_order:
                return True
            self._say(self._dialogue.goodbye())
        except ProtocolError as error:
            self._say(error.farewell)
            self._session._core.proven()
            self._close(CloseClass.TRANSIENT, str(error))
            return True
        except Exception as error:
            self._crash(error)
            return False
        # Nothing after it could be acknowledged any more, until the server sends it again.
        if handled:
            self._session._core.proven()
        why = "more came than there was room for" if handled else "something was not handled"
        self._close(CloseClass.TRANSIENT, f"{why}: a new link brings it again")
        return True

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

    def _on_progress(self, event: Progress) -> None:  # noqa: B027 (there is nothing to do)
        """It has been heard: that is all."""

    def _on_repeat(self, event: Repeat) -> None:
        found = None if self._recent is None else self._recent.get(event.id)
        # Who asks may be anybody: one small question has a large answer, again and again.
        if found is None or self._unsent() > MOST_ANSWERS or self._dialogue is None:
            self._session._counts.not_repeated += 1
            return
        try:
            data = self._dialogue.write(found)
        except StepFailed:
            self._session._counts.not_repeated += 1
            return
        self._session._counts.repeated += 1
        self._session._table.repeated(event.id)
        self._say(data)

    def _on_unhandled(self, event: Unhandled) -> None:
        self._unhandled(event.what)

    def _unhandled(self, what: str) -> None:
        counts = self._session._counts
        counts.unhandled += 1
        # A server that says nothing else shall not fill the logs: from then on, at 128, 256, 512 …
        if counts.unhandled <= MOST_LOGGED or not counts.unhandled & (counts.unhandled - 1):
            text = "%s: a frame that nobody handles (%d so far): %s"
            log.warning(text, self._session._name, counts.unhandled, what)


_HANDLERS: dict[type, Any] = {
    Ready: Hearing._on_ready,
    LoginStep: Hearing._on_login,
    Accepted: Hearing._on_accepted,
    Confirmed: Hearing._on_confirmed,
    ConfirmedUpTo: Hearing._on_confirmed_up_to,
    Refused: Hearing._on_refused,
    Answered: Hearing._on_answered,
    Happening: Hearing._on_happening,
    Closing: Hearing._on_closing,
    Greeting: Hearing._on_greeting,
    Progress: Hearing._on_progress,
    Repeat: Hearing._on_repeat,
    Unhandled: Hearing._on_unhandled,
}
