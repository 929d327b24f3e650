"""A session without a server, for tests of event handlers.

::

    async def test_ping_is_answered() -> None:
        async with session_sandbox(on_event=bot) as sandbox:
            await sandbox.receive(Text("ping"), sender="ann")
            assert sandbox.sent[-1].content == Text("pong")
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moored.sessions import Incoming, Msg, Outgoing, Protocol, Session, Sessions

from .demo import Demo, DemoServer

__all__ = ["SessionSandbox", "session_sandbox"]


class SessionSandbox:
    """Injects events into a session, and records what the session sends."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._numbers = itertools.count(1)

    @property
    def sent(self) -> list[Outgoing]:
        """The messages sent, the newest last; at most the last thousand."""
        assert self.session._runtime.offline is not None
        return list(self.session._runtime.offline.sent)

    async def receive(
        self,
        content: Any,
        *,
        sender: str = "somebody",
        kind: str = "",
        timeout: float = 10.0,
    ) -> None:
        """Inject an incoming message; return when the consumer of events has handled it."""
        kind = kind or type(content).__name__.lower()
        message = Msg(kind, content, f"in-{next(self._numbers)}", sender)
        await self.happen("messages_upsert", message, timeout=timeout)

    async def happen(self, kind: str, data: Any, *, timeout: float = 10.0) -> None:
        """Inject an event; return when the consumer of events has handled it.

        Raise AssertionError if the handler raises (the log has its error), or if the event is not
        handled within the timeout.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def is_done(handled: bool) -> None:
            if not done.done():
                done.set_result(handled)

        if not self.session._runtime.sink.put(Incoming(kind, data, self.session.profile), is_done):
            raise AssertionError(
                "the session has no consumer: pass on_event, or iterate over session.events()"
            )
        try:
            async with asyncio.timeout(timeout):
                handled = await done
        except TimeoutError:
            raise AssertionError(
                f"the event was not handled within {timeout:g} s: its consumer has ended, or hangs"
            ) from None
        if not handled:
            raise AssertionError("the handler raised an exception: see the log")

    def __repr__(self) -> str:
        return f"<SessionSandbox of {self.session!r}: {len(self.sent)} sent>"


@asynccontextmanager
async def session_sandbox(
    profile: str = "bot", protocol: Protocol | None = None, *, on_event: Any = None
) -> AsyncIterator[SessionSandbox]:
    """Open a session without a server: sends are confirmed at once, and no byte is sent.

    :param protocol: decides the features of the session; by default the demo protocol.
    :param on_event: the handler under test; omit it for code that iterates over `session.events()`.
    """
    async with Sessions() as sessions:
        session = await sessions.connect(
            profile, protocol or Demo(DemoServer()), offline=True, on_event=on_event
        )
        yield SessionSandbox(session)
