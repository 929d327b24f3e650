"""What tests of sessions share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from moored.sessions import Happening, Incoming, Session
from moored.sessions._protocol import DialogueEvent
from moored.testing.demo import Demo
from moored.testing.demo._protocol import DemoDialogue

#: Three times what anything here should ever take.
LIMIT = 30.0


async def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait for something that this loop, or a real server, will do by itself."""
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110 (nobody tells us when a server has seen something)
            await asyncio.sleep(0.001)


class BrokenDialogue(DemoDialogue):
    """A link that a message makes crash."""

    __slots__ = ()

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
        for event in super().feed(data):
            if isinstance(event, Happening):
                raise RuntimeError("very-secret: a defect")
            yield event


class Broken(Demo):
    """A protocol with a defect, which a message shows."""

    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> BrokenDialogue:
        return BrokenDialogue(profile, credentials, memory, cumulative=self.cumulative)


def collect(session: Session) -> list[Incoming]:
    """The events of a session, from now on."""
    events: list[Incoming] = []
    session.attach(events.append)
    return events
