"""One account: what its user calls.

A session stays the same object while the parts of its tree are restarted.
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
    from .storage import Records

__all__ = ["AnyHow", "How", "Session", "WaitingHow"]


class _How(TypedDict, total=False):
    id: str | None
    timeout: float
    idempotent: bool
    hold: bool


class How(_How, total=False):
    """How something is sent, so that what was not confirmed is raised: see `Session.send`."""

    outcome: Literal[False]
    wait: Literal[True]


class WaitingHow(_How, total=False):
    """How something is sent, so that its outcome is returned: see `Session.send`."""

    outcome: bool
    wait: Literal[True]


class AnyHow(_How, total=False):
    """How something is sent: see `Session.send`."""

    outcome: bool
    wait: bool


class Session(ABC):  # noqa: B024 (so that `SessionVia` can be registered)
    """One account. It is made by `Sessions.start` or `Sessions.connect`."""

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
        timeout: float = 30.0,
        outcome: bool = False,
        wait: bool = True,
        idempotent: bool = False,
        hold: bool = False,
    ) -> Outcome | Submitted:
        """Send something, and wait until the server has confirmed it.

        Sends to one recipient go out in the order of the calls, those to others beside them. What
        was not confirmed is raised (`SendRejected`, `SendNotSent`, `SendUnknown`), or returned, if
        `outcome` is true.

        :param id: by which the server and the recipient know it; drawn, if it is not given.
        :param timeout: how long to wait for the confirmation; more than 0.
        :param wait: if false, return at once: `Submitted`, or the outcome if there is one already.
            A later outcome is counted in `status()`, and nothing else reports it.
        :param idempotent: write it again, once and with the same id, when the link was lost and
            nobody can say whether it arrived.
        :param hold: without a link, wait for one within the timeout, instead of failing at once.
        """
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
                self._runtime.sends.table.failed(parked, "its caller has gone")
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
        """Send the descriptor of something that was uploaded; for `how`, see `send`."""
        self._needs(Feature.MEDIA)
        return await self.send(recipient, media, **how)

    async def upload(self, kind: str, data: bytes, *, caption: str = "") -> Media:
        """Put bytes where others can get them."""
        self._needs(Feature.MEDIA)
        media: Media = await self.protocol.upload(self, kind, data, caption)
        return media

    async def download(self, media: Media) -> bytes:
        """Get the bytes of a descriptor."""
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
        """Ask a question; the outcome's `extra` is the secret with which answers are read."""
        self._needs(Feature.POLLS)
        return await self.send(recipient, poll, **how)

    async def group(self, action: str, **details: Any) -> Any:
        """Do something with a group: "create", "add", "remove", "info", as the protocol has it."""
        self._needs(Feature.GROUPS)
        return await self._ask(self.protocol.question(f"group_{action}", **details))

    async def set_presence(self, state: str, to: str = "") -> None:
        """Say that this account is there, or not, or writes."""
        self._needs(Feature.PRESENCE)
        await self._ask(self.protocol.question("presence", state=state, to=to))

    async def mark_read(self, sender: str, *ids: str) -> None:
        """Tell a sender that these were read."""
        self._needs(Feature.READ_MARKERS)
        await self._ask(self.protocol.question("read", of=sender, ids=list(ids)))

    async def subscribe(self, topic: str) -> None:
        """Hear what is published to these topics, over this link and every later one.

        Returns when the server has granted it; raises `QueryFailed` if it does not. The next
        process does not subscribe to it: what an account always hears is in its protocol's
        settings.
        """
        self._needs(Feature.SUBSCRIPTIONS)
        await self._ask(self.protocol.question("subscribe", topic=topic))

    async def unsubscribe(self, topic: str) -> None:
        """Hear no more of these topics, whether they were added by a call or by the settings."""
        self._needs(Feature.SUBSCRIPTIONS)
        await self._ask(self.protocol.question("unsubscribe", topic=topic))

    # -- asking --------------------------------------------------------------------------------

    async def query(self, question: Any, timeout: float = 20.0) -> Any:
        """Ask the server something, and wait for its answer; there is none to a `Notice`."""
        self._needs(Feature.QUERIES)
        return await self._ask(question, timeout)

    async def _ask(self, question: Any, timeout: float = 20.0) -> Any:
        check_timeout(timeout)
        check_loop(asyncio.get_running_loop(), self._runtime.owner._loop)
        await asyncio.sleep(0)  # a caller that repeats what fails at once lets others run
        if self._runtime.offline is not None:
            return self._runtime.offline.answer(question)
        if self._runtime.connection is None:
            raise NotConnected(self._runtime.why_offline)
        if not isinstance(question, Notice):
            return await self._runtime.connection.ask(question, timeout)
        self._runtime.connection.tell(question.data)
        # It goes out now, and whoever says many of them leaves room for others.
        await asyncio.sleep(0)
        return None

    def answer_login(self, answer: Any) -> None:
        """Answer what the event `login` asked for."""
        self._needs(Feature.PAIRING)
        if self._runtime.connection is None:
            raise NotConnected(self._runtime.why_offline)
        self._runtime.connection.answer_login(answer)

    # -- receiving -----------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Incoming] | None) -> None:
        """Give every event to this handler or queue from now on, and those that waited first."""
        check_handler(handler)
        self._runtime.sink.attach(handler)

    def events(self) -> EventStream:
        """Every event from now on, and those that waited first; ends with the session.

        ::

            async for event in session.events():  # acknowledges when it asks for the next event
                ...

            async with session.events() as events:  # and at its end, unless that is an exception
                async for event in events:
                    return event
        """
        return EventStream(self._runtime.sink)

    # -- its connection ------------------------------------------------------------------------

    async def connect(self, timeout: float | None = 30.0) -> None:
        """Connect after `disconnect`, or after a refusal, and wait until that is done.

        A session that waits between two attempts makes the next one now.
        """
        self._check_running()
        self._runtime.core.connect("the user connected it")
        self._runtime.changed()
        if self._runtime.connection is not None:
            self._runtime.connection.poke()
        await self._wait(timeout, self._is_online)

    async def disconnect(self) -> None:
        """Close the link and make no other; the session stays, and so does its profile."""
        self._check_running()
        if self._runtime.core.machine.phase in ("connecting", "online"):
            self._runtime.core.disconnect()
            if self._runtime.connection is not None:
                self._runtime.connection.disconnect("the user disconnected it")
            self._runtime.changed()

    async def online(self, timeout: float | None = None) -> None:
        """Wait until a send can be made: there is a link, and room for one more send.

        It is what to await before a send that was `NotSent` is made again. Raises `NotConnected` if
        there will be no link, or none within the timeout, and `SessionStopped` after a stop.
        """
        await self._wait(timeout, lambda: self._is_online() and self._runtime.sends.has_room)

    def _is_online(self) -> bool:
        if self._runtime.core.stopped:
            raise SessionStopped(self._runtime.why_offline)
        if self._runtime.core.machine.phase == "offline":
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
                raise NotConnected(f"no room for a send within {timeout:g} s: {self!r}") from None
            why = self._runtime.why_offline
            raise NotConnected(f"not online within {timeout:g} s: {why}") from None

    async def stop(self, *, drain: float = 0.0) -> None:
        """End the session, and free its profile.

        :param drain: how many seconds the sends under way have to be settled first; new ones are
            `NotSent` meanwhile. With 0, what was not confirmed yet is settled at once.
        """
        await self._runtime.owner.stop(self, drain=drain)

    def _check_running(self) -> None:
        if self._runtime.core.stopped:
            raise SessionStopped(self._runtime.why_offline)

    # -- for people ----------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Where it is, such as "online" or "connecting/waiting"."""
        return self._runtime.state

    @property
    def generation(self) -> int:
        """The number of its current link."""
        return self._runtime.core.generation

    @property
    def fence(self) -> int | None:
        """The fence of its lease, for whatever else this account changes; None without one."""
        return None if self._runtime.lease is None else self._runtime.lease.fence

    @property
    def records(self) -> Records:
        """What is stored for this account; a change is made by one at a time. For steps."""
        return self._runtime.records

    def status(self) -> dict[str, Any]:
        """What there is to know, without contents and recipients."""
        machine, core = self._runtime.core.machine, self._runtime.core
        now = self._runtime.clock.monotonic()
        kind, reason = core.why
        return {
            "profile": self.profile,
            "protocol": self.protocol.name,
            "state": self.state,
            "for": now - machine.since,
            "generation": core.generation,
            "kind": None if kind is None else kind.value,
            "reason": reason,
            "next_attempt_in": core.next_attempt_in(now),
            "sending": len(self._runtime.sends.table),
            "waiting": len(self._runtime.sends.outbox),
            "events_waiting": len(self._runtime.sink.queue),
            **self._runtime.totals(),
        }

    def __repr__(self) -> str:
        now = self._runtime.clock.monotonic() - self._runtime.core.machine.since
        under_way = counted(len(self._runtime.sends.table), "send")
        return (
            f"<Session {self.profile!r} over {self.protocol.name}: {self.state} for "
            f"{duration(now)}, {under_way} under way>"
        )

    def _needs(self, feature: Feature) -> None:
        if feature not in self.protocol.features:
            known = ", ".join(sorted(each.value for each in self.protocol.features)) or "none"
            raise Unsupported(
                f"{self.protocol.name} has no {feature.value}; it has: {known}; "
                "send() takes what it can carry"
            )
