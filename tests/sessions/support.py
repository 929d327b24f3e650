"""What tests of sessions share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moored.sessions import Event, Session

#: Three times what anything here should ever take.
LIMIT = 30.0


async def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait for something that this loop, or a real server, will do by itself."""
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110 (nobody tells us when a server has seen something)
            await asyncio.sleep(0.001)


def collect(session: Session) -> list[Event]:
    """The events of a session, from now on."""
    events: list[Event] = []
    session.attach(events.append)
    return events
