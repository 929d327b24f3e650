"""Helpers for the tests of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from moored.sessions import Happening, Incoming, Session
from moored.sessions._protocol import DialogueEvent
from moored.testing.demo import Demo
from moored.testing.demo._protocol import DemoDialogue

#: Three times the longest time that any wait here should take, in seconds.
LIMIT = 30.0


async def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait until a condition holds."""
    pause = 0.001
    async with asyncio.timeout(limit):
        while not condition():  # (a real server does not notify the test)
            await asyncio.sleep(pause)
            pause = min(1.2 * pause, 0.01)


class BrokenDialogue(DemoDialogue):
    """A dialogue that raises on the first message."""

    __slots__ = ()

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
        for event in super().feed(data):
            if isinstance(event, Happening):
                raise RuntimeError("very-secret: a defect")
            yield event


class Broken(Demo):
    """A protocol whose session crashes on the first message."""

    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> BrokenDialogue:
        return BrokenDialogue(profile, credentials, memory, cumulative=self.cumulative)


def collect(session: Session) -> list[Incoming]:
    """Return a list that collects the events of a session."""
    events: list[Incoming] = []
    session.attach(events.append)
    return events
