"""One link of the demo server: its login, its sends, and the faults that the test has set."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moored.sessions import ProtocolError
from moored.sessions.transport import Transport

from ._frames import DemoFrames, Frame, bytes_of, count_of, encode, text_of
from ._world import DemoAccount, Denied

if TYPE_CHECKING:
    from ._server import DemoServer

__all__ = ["ServerLink"]

# The code of a `close` frame, by the class of its reason.
_CODES = {
    "takeover": 440,
    "authentication": 401,
    "banned": 403,
    "outdated": 405,
    "restart": 515,
    "transient": 503,
}


@dataclass(slots=True, eq=False, repr=False)
class ServerLink:
    """One link of the server; the receiver of its transport."""

    _server: DemoServer
    _transport: Transport
    _frames: DemoFrames = field(default_factory=DemoFrames)
    #: The profile of the client's hello; `account` is set when it has logged in.
    profile: str = ""
    account: DemoAccount | None = None
    #: The pairing code that the client was sent.
    code: str | None = None
    cumulative: bool = False
    resumes: bool = False
    # The number of sends that the next count confirms.
    _arrived: int = 0
    # Frames of a cumulative link that are sent later, in order, each with its time.
    _delayed: list[tuple[float, Frame]] = field(default_factory=list)

    # -- sending -------------------------------------------------------------------------------

    def say(self, frame: Frame | bytes) -> None:
        """Send a frame, or raw bytes, valid or not."""
        self._transport.write(frame if isinstance(frame, bytes) else encode(frame))

    def close(self, kind: str, reason: str, **more: Any) -> None:
        """Send the reason, then close the link."""
        self.say({"k": "close", "class": kind, "code": _CODES[kind], "reason": reason, **more})
        self._end()

    def _end(self) -> None:
        self._transport.close()
        self._server._gone(self)

    def cut(self) -> None:
        """Abort the link without a reason."""
        self._transport.abort()
        self._server._gone(self)

    # -- receiving -----------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self._server.deaf:
            return
        try:
            for frame in self._frames.feed(data):
                self._handle(frame)
        except (ProtocolError, RecursionError) as error:
            # (RecursionError: a deeply nested content, which was decoded but cannot be encoded.)
            self._server.protocol_errors += 1
            self.say(getattr(error, "farewell", b""))
            self._end()
        if self._arrived:
            count, self._arrived = self._arrived, 0
            self._confirm({"k": "upto", "more": count})

    def lost(self, error: BaseException | None) -> None:
        """Remove the link: its connection is lost."""
        self._server._gone(self)

    def _handle(self, frame: Frame) -> None:
        kind = frame["k"]
        if kind == "send" and self.account is not None:
            self._send(frame, self.account)
        elif kind == "ping":
            self.say({"k": "pong"})
        elif kind == "got" and self.account is not None:
            self._server.world.got(self.account.name, count_of(frame, "n"))
        elif kind == "query" and self.account is not None:
            self._query(frame, self.account)
        elif kind == "notice" and self.account is not None:
            with contextlib.suppress(Denied):
                self._server.world.answer(self.account.name, frame.get("notice"))
        elif kind == "hello" and not self.profile:
            self._hello(frame)
        elif kind == "login" and self.code is not None:
            if text_of(frame, "answer") == self.code:
                self._server.confirm(self.profile)
            else:
                self.close("authentication", "the pairing code is wrong")
        elif kind == "bye":
            self._end()
        elif kind not in ("pong", "error"):
            raise ProtocolError(f"unexpected frame {kind[:32]!r}", encode({"k": "error"}))

    def _hello(self, frame: Frame) -> None:
        server = self._server
        profile = self.profile = text_of(frame, "profile")
        if not profile:
            raise ProtocolError("the profile is empty", encode({"k": "error"}))
        self.cumulative = frame.get("cumulative") is True
        self.resumes = "resume" in frame
        account = server.world.accounts.get(profile)
        version = count_of(frame, "v")
        try:
            key = None if frame.get("key") is None else bytes_of(frame["key"])
        except ValueError:
            key = b""
        if version < server.minimum_version:
            self.close("outdated", f"version {version} is no longer supported")
        elif account is not None and account.banned:
            self.close("banned", "the account is banned")
        elif account is not None and account.key is not None and key is not None:
            if key == account.key:
                self._log_in(account, frame.get("resume"))
            else:
                self.close("authentication", "the credentials are not accepted")
        elif server.pairing and key is None:
            self.code = server.world.token(4)
            server._pairs(self)
            self.say({"k": "pair", "code": self.code})
        elif server.pairing or (account is not None and account.key is not None):
            self.close("authentication", "the credentials are not accepted")
        else:
            self._log_in(server.world.account(profile), frame.get("resume"))

    def _log_in(self, account: DemoAccount, token: Any) -> None:
        server = self._server
        resumed = bool(token) and token == account.resumable
        self.account = account
        server._logs_in(self)
        if not resumed:
            account.resumable = server.world.token() if self.resumes else None
        self.say(
            {
                "k": "welcome",
                "resumed": resumed,
                "token": account.resumable or "",
                "window": server.window,
            }
        )
        for frame in list(account.mail.values()):
            self.say(frame)
            frame["again"] = True  # if it must be sent again

    def _query(self, frame: Frame, account: DemoAccount) -> None:
        id = text_of(frame, "id")
        try:
            value = self._server.world.answer(account.name, frame.get("question"))
        except Denied as denied:
            self._later({"k": "answer", "id": id, "code": denied.code, "value": denied.reason})
        else:
            self._later({"k": "answer", "id": id, "value": value})

    # -- sends and their acks ------------------------------------------------------------------

    def _send(self, frame: Frame, account: DemoAccount) -> None:
        id, recipient = text_of(frame, "id"), text_of(frame, "to")
        content = frame.get("content")
        if self.cumulative:
            self._arrived += 1
        try:
            extra = self._server._take(self, account.name, recipient, id, content)
        except Denied as denied:
            self._later({"k": "nack", "id": id, "code": denied.code, "reason": denied.reason})
            return
        if self.cumulative:
            return
        ack: Frame = {"k": "ack", "id": id}
        if extra is not None:
            ack["extra"] = extra
        self._confirm(ack)

    def _confirm(self, frame: Frame) -> None:
        server = self._server
        if server.drop_acks > 0:
            server.drop_acks -= 1
            server.dropped_acks += 1
            # A dropped count is part of the next one.
            self._arrived += frame.get("more", 0)
            return
        self._later(frame)
        if server.duplicate_acks and frame["k"] == "ack":
            self._later(frame)

    def _later(self, frame: Frame) -> None:
        """Send an ack or an answer after the server's delay."""
        delay = self._server.delay
        seconds = delay() if callable(delay) else delay
        loop = asyncio.get_running_loop()
        if self.cumulative:
            # A count covers every send before it, so no frame may overtake another one.
            self._delayed.append((loop.time() + seconds, frame))
            if len(self._delayed) == 1:
                self._say_delayed()
        elif seconds > 0:
            loop.call_later(seconds, self.say, frame)
        else:
            self.say(frame)

    def _say_delayed(self) -> None:
        loop = asyncio.get_running_loop()
        while self._delayed and self._delayed[0][0] <= loop.time():
            self.say(self._delayed.pop(0)[1])
        if self._delayed:
            loop.call_at(self._delayed[0][0], self._say_delayed)
