"""The server of the demo protocol, within the process or on a TCP port.

It is for demos, docs and tests, and keeps everything in memory. By default it behaves correctly;
each fault of a server has an attribute or a method.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

from moored.sessions import InMemory, Tcp
from moored.sessions.transport import Endpoint, Receiver, Stream, Transport, read_buffer

from ._frames import Frame, text_from, wire_form
from ._link import ServerLink
from ._world import Denied, World

__all__ = ["DemoServer", "ReceivedSend"]


@dataclass(slots=True)
class ReceivedSend:
    """A send that the server has accepted."""

    profile: str
    recipient: str
    id: str
    content: Any
    #: The number of duplicates that arrived.
    duplicates: int = 0
    #: The `extra` of the ack: the secret of a poll.
    extra: Any = None
    #: The number of calls of `forget` before it arrived.
    era: int = 0


class _HangsUp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


@dataclass(eq=False, repr=False)
class DemoServer:
    """A server of the demo protocol."""

    _: KW_ONLY
    #: Whether accounts need credentials, which the first login issues; otherwise any name is
    #: accepted.
    pairing: bool = False
    #: The most unconfirmed sends; None for any number.
    window: int | None = None
    #: Whether sends to unknown accounts are refused; otherwise they are confirmed and dropped.
    strict: bool = False
    #: The source of codes, keys and secrets.
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    #: The number of sends to remember, for `received` and to recognise duplicates.
    history: int = 100_000
    # -- faults --
    #: The number of acks to drop, from the next one on.
    drop_acks: float = 0
    #: Whether each ack is sent twice.
    duplicate_acks: bool = False
    #: Seconds until an ack or an answer is sent, or a function that returns them for each one.
    delay: float | Callable[[], float] = 0.0
    #: Whether it ignores all received bytes, as if it had hung.
    deaf: bool = False
    #: Whether it refuses new links.
    refusing: bool = False
    #: The oldest version of clients that is accepted.
    minimum_version: int = 1

    def __post_init__(self) -> None:
        self.world = World(self.rng, self._tell)
        self._received: dict[tuple[str, str], ReceivedSend] = {}
        self._links: dict[str, ServerLink] = {}
        self._unknown: dict[ServerLink, None] = {}
        self._pairing: dict[str, ServerLink] = {}
        self._rejections: dict[str, tuple[object, str]] = {}
        self._era = 0
        #: The endpoint for clients in this process.
        self.memory = InMemory(self.accept, name="demo server")
        self._tcp: Tcp | None = None
        self._listener: asyncio.AbstractServer | None = None
        self.accepted_links = self.dropped_acks = self.protocol_errors = 0

    # -- serving -------------------------------------------------------------------------------

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint for clients: the TCP port after `serve()`, otherwise `memory`."""
        return self.memory if self._tcp is None else self._tcp

    async def serve(
        self, host: str = "127.0.0.1", port: int = 0, *, tls: ssl.SSLContext | None = None
    ) -> Tcp:
        """Serve over TCP as well; return the endpoint. (With `tls`, clients need their own.)"""
        loop = asyncio.get_running_loop()
        buffer = read_buffer(loop)

        def take() -> asyncio.BaseProtocol:
            if self.refusing:
                return _HangsUp()
            stream = Stream(buffer)
            stream.receiver = self.accept(stream)
            return stream

        if self._listener is not None:
            # A simulated host was killed and restarted: its links were not reported as lost.
            self._links.clear()
            self._unknown.clear()
            self._pairing.clear()
        self._listener = listener = await loop.create_server(take, host, port, ssl=tls)
        self._tcp = Tcp(host, listener.sockets[0].getsockname()[1])
        return self._tcp

    async def close(self) -> None:
        """Stop serving, and abort all links."""
        self.refusing = True
        self.cut()
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
            self._listener = self._tcp = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def accept(self, transport: Transport) -> Receiver:
        """Create the receiver of a new link."""
        if self.refusing:
            raise ConnectionRefusedError(111, "the demo server refuses new links")
        self.accepted_links += 1
        link = ServerLink(self, transport)
        self._unknown[link] = None
        return link

    # -- inspection ----------------------------------------------------------------------------

    @property
    def received(self) -> list[ReceivedSend]:
        """The accepted sends, in order, each once."""
        return list(self._received.values())

    @property
    def online(self) -> list[str]:
        """The profiles with a link."""
        return list(self._links)

    @property
    def waiting(self) -> list[str]:
        """The profiles that wait for `confirm`."""
        return list(self._pairing)

    def mail(self, profile: str) -> int:
        """The number of messages that an account has not acknowledged."""
        account = self.world.accounts.get(profile)
        return 0 if account is None else len(account.mail)

    # -- commands ------------------------------------------------------------------------------

    def add(self, profile: str) -> bytes:
        """Create an account, or replace its credentials; return the credentials."""
        key = bytes.fromhex(self.world.token())
        self.world.account(profile).key = key
        return key

    def confirm(self, profile: str) -> None:
        """Confirm the pairing code of an account that waits for it."""
        link = self._pairing.pop(profile)
        link.code = None
        link.say({"k": "paired", "key": text_from(self.add(profile))})
        link.close("restart", "log in with the new credentials")

    def reject(self, recipient: str, code: object, reason: str = "") -> None:
        """Refuse sends to a recipient with this code from now on; None to accept them again."""
        if code is None:
            self._rejections.pop(recipient, None)
        else:
            self._rejections[recipient] = (code, reason)

    def deliver(self, profile: str, content: Any, *, sender: str = "server", id: str = "") -> None:
        """Send a message to an account, now or when it is online again."""
        self.world.account(profile)
        self.world.post(
            profile,
            {
                "k": "message",
                "from": sender,
                "id": id or self.world.token(8),
                "content": wire_form(content),
            },
        )

    def cut(self, profile: str | None = None) -> int:
        """Abort the link of an account, or all links, without a reason; return how many."""
        if profile is None:
            links = [*self._links.values(), *self._unknown]
        else:
            links = [self._links[profile]] if profile in self._links else []
        for link in links:
            link.cut()
        return len(links)

    def hang_up(self, profile: str, *, retry_after: float | None = None) -> None:
        """Close the link of an account with a transient reason."""
        more = {} if retry_after is None else {"retry_after": retry_after}
        self._links[profile].close("transient", "the server is busy", **more)

    def restart(self, profile: str) -> None:
        """Request a new link from an account."""
        self._links[profile].close("restart", "a new link is needed")

    def take_over(self, profile: str) -> None:
        """Close the link of an account as if it had connected from elsewhere."""
        self._links[profile].close("takeover", "connected from elsewhere")

    def ban(self, profile: str, banned: bool = True) -> None:
        """Ban an account, or unban it."""
        self.world.account(profile).banned = banned
        if banned and profile in self._links:
            self._links[profile].close("banned", "the account is banned")

    def revoke(self, profile: str) -> None:
        """Invalidate the credentials of an account."""
        self.add(profile)
        if profile in self._links:
            self._links[profile].close("authentication", "the credentials are not accepted")

    def bounce(self, profile: str, id: str, code: object, reason: str = "") -> None:
        """Report to an account that a confirmed send could not be delivered."""
        self._links[profile].say({"k": "bounce", "id": id, "code": code, "reason": reason})

    def forget(self) -> None:
        """Discard the state for resumption, as a server that was restarted would."""
        for account in self.world.accounts.values():
            account.resumable = None
        self._era += 1

    def say(self, profile: str, frame: Frame | bytes) -> None:
        """Send a frame, or raw bytes, to an account: an unexpected ack, or invalid data."""
        self._links[profile].say(frame)

    # -- called by its links -------------------------------------------------------------------

    def _tell(self, name: str, frame: Frame) -> None:
        link = self._links.get(name)
        if link is not None:
            link.say(frame)
            if frame["k"] == "message":
                frame["again"] = True  # if it must be sent again

    def _pairs(self, link: ServerLink) -> None:
        self._pairing[link.profile] = link

    def _logs_in(self, link: ServerLink) -> None:
        old = self._links.pop(link.profile, None)
        if old is not None:
            old.close("takeover", "connected from elsewhere")
        self._unknown.pop(link, None)
        self._links[link.profile] = link
        self.world.appear(link.profile, "available")

    def _gone(self, link: ServerLink) -> None:
        self._unknown.pop(link, None)
        if self._pairing.get(link.profile) is link:
            del self._pairing[link.profile]
        if self._links.get(link.profile) is link:
            del self._links[link.profile]
            self.world.appear(link.profile, "unavailable")

    def _take(self, link: ServerLink, sender: str, recipient: str, id: str, content: Any) -> Any:
        """Accept a send; return the `extra` of its ack, or raise `Denied`."""
        known = self._received.get((sender, id))
        if known is not None:
            known.duplicates += 1
            if not link.resumes or known.era != self._era:
                self._route(sender, recipient, id, content, again=True)
            return known.extra
        self._check(recipient)
        self._route(sender, recipient, id, content)
        is_poll = isinstance(content, dict) and content.get("type") == "poll"
        extra = {"secret": self.world.token()} if is_poll else None
        if self.history:
            while len(self._received) >= self.history:
                del self._received[next(iter(self._received))]
            self._received[sender, id] = ReceivedSend(
                sender, recipient, id, content, 0, extra, self._era
            )
        return extra

    def _check(self, recipient: str) -> None:
        if recipient in self._rejections:
            raise Denied(*self._rejections[recipient])
        if self.strict and not {recipient} & {*self.world.accounts, *self.world.groups}:
            raise Denied(404, "there is no such account")

    def _route(
        self, sender: str, recipient: str, id: str, content: Any, *, again: bool = False
    ) -> None:
        names = self.world.members(sender, recipient)
        frame: Frame = {"k": "message", "from": sender, "id": id, "content": content}
        if recipient in self.world.groups:
            frame["to"] = recipient
        if again:
            frame["again"] = True
        for name in names:
            self.world.post(name, frame)

    def __repr__(self) -> str:
        return (
            f"<DemoServer at {self.endpoint}: {len(self._links)} online, "
            f"{len(self._received)} sends received>"
        )
