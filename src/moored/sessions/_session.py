"""The public interface of one account.

A session stays the same object while the children of its tree are restarted.
"""

from __future__ import annotations

import asyncio
from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from moored.kernel import counted, duration

from ._checks import check_handler, check_loop, check_timeout
from ._content import Incoming, Media, Poll, Text
from ._errors import NotConnected, SessionError, SessionStopped, Unsupported
from ._protocol import Feature, Notice, Protocol
from .events import EventStream, Handler
from .sending import Acked, Outcome, Submitted, error_of

if TYPE_CHECKING:
    from ._runtime import SessionRuntime
    from .link import LastLoss
    from .storage import Records

__all__ = ["AnyHow", "How", "Session", "WaitingHow"]


class _How(TypedDict, total=False):
    id: str | None
    timeout: float | None
    idempotent: bool
    hold: bool


class How(_How, total=False):
    """Options of a send whose failures are raised: see `Session.send`."""

    outcome: Literal[False]
    wait: Literal[True]


class WaitingHow(_How, total=False):
    """Options of a send that returns its outcome: see `Session.send`."""

    outcome: bool
    wait: Literal[True]


class AnyHow(_How, total=False):
    """Options of a send: see `Session.send`."""

    outcome: bool
    wait: bool


class Session(ABC):  # noqa: B024 (so that `SessionVia` can be registered)
    """One account; created by `Sessions.start` or `Sessions.connect`."""

    __slots__ = ("__weakref__", "_runtime", "profile", "protocol")

    def __init__(self, runtime: SessionRuntime) -> None:
        self.profile: str = runtime.profile
        self.protocol: Protocol = runtime.protocol
        self._runtime = runtime

    # -- sending -------------------------------------------------------------------------------

    @overload
    async def send(self, recipient: str, content: Any, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send(self, recipient: str, content: Any, **how: Unpack[WaitingHow]) -> Outcome: ...

    @overload
    async def send(
        self, recipient: str, content: Any, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted: ...

    async def send(
        self,
        recipient: str,
        content: Any,
        *,
        id: str | None = None,
        timeout: float | None = None,
        outcome: bool = False,
        wait: bool = True,
        idempotent: bool = False,
        hold: bool = False,
    ) -> Outcome | Submitted:
        """Send a message, and wait until the server has confirmed it.

        Sends to one recipient are written in the order of the calls, sends to different recipients
        concurrently. A send that is not confirmed raises `SendRejected`, `SendNotSent` or
        `SendUnknown`; with `outcome=True`, its outcome is returned instead.

        :param id: the id for the server and the recipient; random by default.
        :param timeout: the seconds to wait for the confirmation; more than 0. None for the
            `send_timeout` of `Sessions`.
        :param wait: if false, return immediately: `Submitted`, or the outcome if it is known. A
            later outcome is only counted in `status()`.
        :param idempotent: write it once more, with the same id, if the link was lost and it is
            unknown whether it arrived.
        :param hold: without a link, wait for one until the timeout, instead of failing immediately.
        """
        if timeout is None:
            timeout = self._runtime.owner._send_timeout
        try:
            parked = self._runtime.sends.begin(recipient, content, id, timeout, idempotent, hold)
        except SessionError:
            await asyncio.sleep(0)  # as below
            raise
        if not wait:
            await asyncio.sleep(0)
            return parked.outcome or Submitted(parked.id)
        try:
            if parked.outcome is not None:
                # A caller that retries a send which fails immediately must not block the loop.
                await asyncio.sleep(0)
            found: Outcome = parked.outcome or await parked.future  # type: ignore[misc]
        except asyncio.CancelledError:
            if not parked.written_in:
                self._runtime.sends.table.failed(parked, "its caller was cancelled")
            raise
        if outcome or isinstance(found, Acked):
            return found
        raise error_of(found)

    @overload
    async def send_text(self, recipient: str, text: str, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send_text(self, recipient: str, text: str, **how: Unpack[WaitingHow]) -> Outcome: ...

    @overload
    async def send_text(
        self, recipient: str, text: str, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted: ...

    async def send_text(
        self, recipient: str, text: str, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted:
        """Send a text; for `how`, see `send`."""
        self._needs(Feature.TEXT)
        return await self.send(recipient, Text(text), **how)

    @overload
    async def send_media(self, recipient: str, media: Media, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send_media(
        self, recipient: str, media: Media, **how: Unpack[WaitingHow]
    ) -> Outcome: ...

    @overload
    async def send_media(
        self, recipient: str, media: Media, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted: ...

    async def send_media(
        self, recipient: str, media: Media, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted:
        """Send the descriptor of an upload; for `how`, see `send`."""
        self._needs(Feature.MEDIA)
        return await self.send(recipient, media, **how)

    async def upload(self, kind: str, data: bytes, *, caption: str = "") -> Media:
        """Upload bytes, and return the descriptor to send."""
        self._needs(Feature.MEDIA)
        media: Media = await self.protocol.upload(self, kind, data, caption)
        return media

    async def download(self, media: Media) -> bytes:
        """Return the bytes of a descriptor."""
        self._needs(Feature.MEDIA)
        return await self.protocol.download(self, media)

    @overload
    async def send_poll(self, recipient: str, poll: Poll, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send_poll(self, recipient: str, poll: Poll, **how: Unpack[WaitingHow]) -> Outcome: ...

    @overload
    async def send_poll(
        self, recipient: str, poll: Poll, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted: ...

    async def send_poll(
        self, recipient: str, poll: Poll, **how: Unpack[AnyHow]
    ) -> Outcome | Submitted:
        """Send a poll; the outcome's `extra` is the secret for reading the votes."""
        self._needs(Feature.POLLS)
        return await self.send(recipient, poll, **how)

    async def group(self, action: str, **details: Any) -> Any:
        """Manage a group: "create", "add", "remove", "info", or another action of the protocol."""
        self._needs(Feature.GROUPS)
        return await self._ask(self.protocol.question(f"group_{action}", **details))

    async def set_presence(self, state: str, to: str = "") -> None:
        """Publish whether this account is available, unavailable or typing."""
        self._needs(Feature.PRESENCE)
        await self._ask(self.protocol.question("presence", state=state, to=to))

    async def mark_read(self, sender: str, *ids: str) -> None:
        """Send a sender read markers for these messages."""
        self._needs(Feature.READ_MARKERS)
        await self._ask(self.protocol.question("read", of=sender, ids=list(ids)))

    async def subscribe(self, topic: str) -> None:
        """Subscribe to a topic filter, over this link and every later one of this session.

        Returns when the server has granted it; raises `QueryFailed` if it refuses. The next process
        does not subscribe to it: permanent subscriptions belong in the protocol's settings.
        """
        self._needs(Feature.SUBSCRIPTIONS)
        await self._ask(self.protocol.question("subscribe", topic=topic))

    async def unsubscribe(self, topic: str) -> None:
        """Unsubscribe from a topic filter that was added by a call or by the settings."""
        self._needs(Feature.SUBSCRIPTIONS)
        await self._ask(self.protocol.question("unsubscribe", topic=topic))

    # -- queries -------------------------------------------------------------------------------

    async def query(self, question: Any, timeout: float = 20.0) -> Any:
        """Query the server, and return its answer; None for a `Notice`, which is not answered."""
        self._needs(Feature.QUERIES)
        return await self._ask(question, timeout)

    async def _ask(self, question: Any, timeout: float = 20.0) -> Any:
        check_timeout(timeout)
        check_loop(asyncio.get_running_loop(), self._runtime.owner._loop)
        await asyncio.sleep(0)  # a caller that retries immediately must not block the loop
        if self._runtime.offline is not None:
            return self._runtime.offline.answer(question)
        if self._runtime.connection is None:
            raise NotConnected(self._runtime.why_offline)
        if isinstance(question, Notice):
            self._runtime.connection.tell(question.data)
            await asyncio.sleep(0)  # a caller that sends many notices must not block the loop
            return None
        return await self._runtime.connection.ask(question, timeout)

    def answer_login(self, answer: Any) -> None:
        """Answer the login step of the event `login`."""
        self._needs(Feature.PAIRING)
        if self._runtime.connection is None:
            raise NotConnected(self._runtime.why_offline)
        self._runtime.connection.answer_login(answer)

    # -- receiving -----------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Incoming] | None) -> None:
        """Deliver all events to this handler or queue from now on, the queued ones first."""
        check_handler(handler)
        self._runtime.sink.attach(handler)

    def events(self) -> EventStream:
        """Return an iterator over all events, the queued ones first, until the session ends.

        ::

            async for event in session.events():  # acknowledges when it requests the next event
                ...

            async with session.events() as events:  # and at the end, if it does not raise
                async for event in events:
                    return event
        """
        return EventStream(self._runtime.sink)

    # -- the connection ------------------------------------------------------------------------

    async def connect(self, timeout: float | None = 30.0) -> None:
        """Connect after `disconnect` or after a refusal, and wait until the session is online.

        A session that waits for its next attempt makes it now.
        """
        self._check_running()
        self._runtime.core.connect(self._runtime.clock.monotonic(), "the user connected it")
        self._runtime.changed()
        if self._runtime.connection is not None:
            self._runtime.connection.poke()
        await self._wait(timeout, self._is_online)

    async def disconnect(self) -> None:
        """Close the link and stay offline until `connect`; the session keeps its profile."""
        self._check_running()
        if not self._runtime.core.link.machine.at("off"):
            self._runtime.core.disconnect()
            if self._runtime.connection is not None:
                self._runtime.connection.disconnect("the user disconnected it")
            self._runtime.changed()

    async def online(self, timeout: float | None = None) -> None:
        """Wait until a send can be made: the link is ready, and the queue of sends is not full.

        Await this before you repeat a send that was `NotSent`. Raises `NotConnected` if the session
        does not reconnect, or not within the timeout, and `SessionStopped` after a stop.
        """
        await self._wait(timeout, lambda: self._is_online() and self._runtime.sends.has_room)

    def _is_online(self) -> bool:
        if self._runtime.core.stopped:
            raise SessionStopped(self._runtime.why_offline)
        if self._runtime.core.link.machine.at("off"):
            raise NotConnected(self._runtime.why_offline)
        return self._runtime.core.online

    async def _wait(self, timeout: float | None, is_so: Callable[[], bool]) -> None:
        if timeout is not None:
            check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                await self._runtime.until(is_so)
        except TimeoutError:
            if self._runtime.core.online:
                text = f"too many sends are in progress, for {timeout:g} s: {self!r}"
                raise NotConnected(text) from None
            why = self._runtime.why_offline
            raise NotConnected(f"not online within {timeout:g} s: {why}") from None

    async def stop(self, *, drain: float = 0.0) -> None:
        """Stop the session, and free its profile.

        :param drain: the seconds to wait for the outcomes of sends first; new sends are `NotSent`
            meanwhile. With 0, unconfirmed sends are settled immediately.
        """
        await self._runtime.owner.stop(self, drain=drain)

    def _check_running(self) -> None:
        if self._runtime.core.stopped:
            raise SessionStopped(self._runtime.why_offline)

    # -- status --------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state of the connection, such as "online" or "connecting/waiting"."""
        return self._runtime.state

    @property
    def generation(self) -> int:
        """The number of the current link."""
        return self._runtime.core.link.dials

    @property
    def last_loss(self) -> LastLoss | None:
        """When and why the session lost a link that was ready, and for how long; or None."""
        return self._runtime.core.last_loss

    @property
    def fence(self) -> int | None:
        """The fence of the session's lease, to protect other stores as well; None without one."""
        return None if self._runtime.lease is None else self._runtime.lease.fence

    @property
    def records(self) -> Records:
        """The stored records of this account, for steps; changes of a record never interleave."""
        return self._runtime.records

    def status(self) -> dict[str, Any]:
        """Return the state and the counters, without contents and recipients."""
        core, link = self._runtime.core, self._runtime.core.link
        now = self._runtime.clock.monotonic()
        kind, reason = core.why
        return {
            "profile": self.profile,
            "protocol": self.protocol.name,
            "state": self.state,
            "for": now - link.machine.since,
            "generation": link.dials,
            "kind": None if kind is None else kind.value,
            "reason": reason,
            "next_attempt_in": core.next_attempt_in(now),
            "sending": len(self._runtime.sends.table),
            "waiting": len(self._runtime.sends.outbox),
            "events_waiting": len(self._runtime.sink.queue),
            **self._runtime.totals(),
        }

    def __repr__(self) -> str:
        now = self._runtime.clock.monotonic() - self._runtime.core.link.machine.since
        sends = counted(len(self._runtime.sends.table), "send")
        return (
            f"<Session {self.profile!r} over {self.protocol.name}: {self.state} for "
            f"{duration(now)}, {sends} in progress>"
        )

    def _needs(self, feature: Feature) -> None:
        if feature not in self.protocol.features:
            known = ", ".join(sorted(each.value for each in self.protocol.features)) or "none"
            raise Unsupported(
                f"{self.protocol.name} does not support {feature.value}; it supports: {known}; "
                "send() accepts any content of the protocol"
            )
