"""The demo protocol's server: within the process or over sockets, it does as it is told.

It is for demos, docs and tests, and keeps everything in memory. What it does of its own accord is
what a decent server does; everything bad that a server can do has a switch.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
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
    #: How often it came after the first time.
    duplicates: int = 0
    #: What the ack adds: the secret of a poll.
    extra: Any = None
    #: How often the server had forgotten everything when it came.
    era: int = 0


class _HangsUp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class DemoServer:
    """A server of the demo protocol.

    :param pairing: whether an account needs credentials, which a first login gives to it; without,
        everybody is let in under any name.
    :param window: how many sends may be unconfirmed at once; None for any number.
    :param strict: whether a send to somebody who has never been here is refused; otherwise it is
        confirmed and forgotten.
    :param rng: where its codes, keys and secrets come from; the same seed gives the same ones.
    :param history: how many sends it remembers, for `received` and to recognise duplicates.
    """

    def __init__(
        self,
        *,
        pairing: bool = False,
        window: int | None = None,
        strict: bool = False,
        rng: random.Random | None = None,
        history: int = 100_000,
    ) -> None:
        self.pairing = pairing
        self.window = window
        self.strict = strict
        self.world = World(rng or random.Random(0), self._tell)
        self._history = history
        self._received: dict[tuple[str, str], ReceivedSend] = {}
        self._links: dict[str, ServerLink] = {}
        self._unknown: dict[ServerLink, None] = {}
        self._pairing: dict[str, ServerLink] = {}
        self._rejections: dict[str, tuple[object, str]] = {}
        self._era = 0
        self._memory = InMemory(self.accept, name="demo server")
        self._tcp: Tcp | None = None
        self._listener: asyncio.AbstractServer | None = None
        # -- the script --
        #: How many of the next acks are not sent.
        self.drop_acks: float = 0
        #: Whether each ack is sent twice.
        self.duplicate_acks = False
        #: Whether each ack comes after a partial one.
        self.partial_acks = False
        #: Seconds until an ack or an answer is sent, or a function that says so for each of them.
        self.delay: float | Callable[[], float] = 0.0
        #: Whether it listens to nothing any more, as if it had hung.
        self.deaf = False
        #: Whether it takes new links.
        self.refusing = False
        #: Clients of an older version are sent away.
        self.minimum_version = 1
        # -- what has happened --
        self.accepted_links = 0
        self.dropped_acks = 0
        self.refused_sends = 0
        self.protocol_errors = 0

    # -- where it is ---------------------------------------------------------------------------

    @property
    def endpoint(self) -> Endpoint:
        """Where clients find it: at its socket if it serves one, otherwise in this process."""
        return self._memory if self._tcp is None else self._tcp

    @property
    def memory(self) -> InMemory:
        """Where clients in this process find it."""
        return self._memory

    async def serve(
        self, host: str = "127.0.0.1", port: int = 0, *, tls: ssl.SSLContext | None = None
    ) -> Tcp:
        """Serve over TCP as well; returns where. (With `tls`, who connects needs his own.)"""
        loop = asyncio.get_running_loop()
        buffer = read_buffer(loop)

        def take() -> asyncio.BaseProtocol:
            if self.refusing:
                return _HangsUp()
            stream = Stream(buffer)
            stream.receiver = self.accept(stream)
            return stream

        if self._listener is not None:
            # Its host was killed and runs again: nobody has told the links of its last life.
            self._links.clear()
            self._unknown.clear()
            self._pairing.clear()
        self._listener = listener = await loop.create_server(take, host, port, ssl=tls)
        self._tcp = Tcp(host, listener.sockets[0].getsockname()[1])
        return self._tcp

    async def close(self) -> None:
        """Serve no more; all links are cut."""
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
        """A new link."""
        if self.refusing:
            raise ConnectionRefusedError(111, "the demo server takes no links")
        self.accepted_links += 1
        link = ServerLink(self, transport)
        self._unknown[link] = None
        return link

    # -- what it has seen ----------------------------------------------------------------------

    @property
    def received(self) -> list[ReceivedSend]:
        """The sends that it has accepted, in their order, each once."""
        return list(self._received.values())

    @property
    def online(self) -> list[str]:
        """Who is there."""
        return list(self._links)

    @property
    def waiting(self) -> list[str]:
        """Who waits for `confirm`."""
        return list(self._pairing)

    def mail(self, profile: str) -> int:
        """How many messages somebody has not acknowledged."""
        account = self.world.accounts.get(profile)
        return 0 if account is None else len(account.mail)

    # -- what it can be told to do -------------------------------------------------------------

    def add(self, profile: str) -> bytes:
        """Make an account; returns its credentials."""
        key = bytes.fromhex(self.world.token())
        self.world.account(profile).key = key
        return key

    def confirm(self, profile: str) -> None:
        """Somebody has typed the pairing code of an account that waits for it."""
        link = self._pairing.pop(profile)
        link.code = None
        link.say({"k": "paired", "key": text_from(self.add(profile))})
        link.close("restart", "log in with the new credentials")

    def reject(self, recipient: str, code: object, reason: str = "") -> None:
        """Refuse sends to somebody from now on, with a code; None to take them again."""
        if code is None:
            self._rejections.pop(recipient, None)
        else:
            self._rejections[recipient] = (code, reason)

    def deliver(self, profile: str, content: Any, *, sender: str = "server", id: str = "") -> None:
        """Send something to an account, now or when it is there again."""
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
        """End the link of an account, or all links, without a word; returns how many."""
        if profile is None:
            links = [*self._links.values(), *self._unknown]
        else:
            links = [self._links[profile]] if profile in self._links else []
        for link in links:
            link.cut()
        return len(links)

    def hang_up(self, profile: str, *, retry_after: float | None = None) -> None:
        """Close the link of an account in good order, for no reason that lasts."""
        more = {} if retry_after is None else {"retry_after": retry_after}
        self._links[profile].close("transient", "the server is busy", **more)

    def restart(self, profile: str) -> None:
        """Want a new link from an account."""
        self._links[profile].close("restart", "a new link is needed")

    def take_over(self, profile: str) -> None:
        """Do as if the account had connected from elsewhere."""
        self._links[profile].close("takeover", "connected from elsewhere")

    def ban(self, profile: str, banned: bool = True) -> None:
        """Ban an account, or let it in again."""
        self.world.account(profile).banned = banned
        if banned and profile in self._links:
            self._links[profile].close("banned", "the account is banned")

    def revoke(self, profile: str) -> None:
        """Make the credentials of an account worthless."""
        self.add(profile)
        if profile in self._links:
            self._links[profile].close("authentication", "the credentials are not accepted")

    def bounce(self, profile: str, id: str, code: object, reason: str = "") -> None:
        """Report to an account that a send, which was confirmed, could not be delivered."""
        self._links[profile].say({"k": "bounce", "id": id, "code": code, "reason": reason})

    def forget(self) -> None:
        """Forget what could be resumed, as a server that was started again would."""
        for account in self.world.accounts.values():
            account.resumable = None
        self._era += 1

    def say(self, profile: str, frame: Frame | bytes) -> None:
        """Send a frame, or any bytes, to an account: an ack that nobody waits for, or nonsense."""
        if isinstance(frame, bytes):
            self._links[profile].say_bytes(frame)
        else:
            self._links[profile].say(frame)

    # -- what its links call -------------------------------------------------------------------

    def _tell(self, name: str, frame: Frame) -> None:
        link = self._links.get(name)
        if link is not None:
            link.say(frame)
            if frame["k"] == "message":
                frame["again"] = True  # if it has to be told once more

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
        """Accept a send; returns what its ack adds, or raises `Denied`."""
        known = self._received.get((sender, id))
        if known is not None:
            known.duplicates += 1
            if not link.resumes or known.era != self._era:
                self._route(sender, recipient, id, content, again=True)
            return known.extra
        try:
            self._check(sender, recipient)
            self._route(sender, recipient, id, content)
        except Denied:
            self.refused_sends += 1
            raise
        is_poll = isinstance(content, dict) and content.get("type") == "poll"
        extra = {"secret": self.world.token()} if is_poll else None
        if self._history:
            while len(self._received) >= self._history:
                del self._received[next(iter(self._received))]
            self._received[sender, id] = ReceivedSend(
                sender, recipient, id, content, 0, extra, self._era
            )
        return extra

    def _check(self, sender: str, recipient: str) -> None:
        if recipient in self._rejections:
            raise Denied(*self._rejections[recipient])
        if self.strict and not {recipient} & {*self.world.accounts, *self.world.groups}:
            raise Denied(404, "nobody has that name")

    def _route(
        self, sender: str, recipient: str, id: str, content: Any, *, again: bool = False
    ) -> None:
        names = self.world.members(sender, recipient)
        if not self.world.has_room(names):
            raise Denied(507, "too much mail is waiting")
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
