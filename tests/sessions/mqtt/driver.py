"""Drives a dialogue over a real transport, as a session does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from moored.sessions._protocol import Closing, DialogueEvent, Greeting, Happening, Outgoing, Ready
from moored.sessions.mqtt import Mqtt, MqttMemory
from moored.sessions.transport._transport import Transport

__all__ = ["Driver", "outgoing"]

#: Far more than a loaded machine needs.
LIMIT = 10.0
Kind = TypeVar("Kind")


def outgoing(id: str, content: Any = b"hello", recipient: str = "bob") -> Outgoing:
    """Make a send."""
    return Outgoing(id, recipient, content)


class Driver:
    """One link, and the events of its dialogue."""

    def __init__(self, protocol: Mqtt, profile: str, memory: MqttMemory) -> None:
        self.protocol = protocol
        self.dialogue = protocol.begin(profile, None, memory)
        self.events: list[DialogueEvent] = []
        self.lost_with: list[BaseException | None] = []
        #: Whether messages are acknowledged as they arrive.
        self.acknowledges = False
        self.transport: Transport | None = None
        self._changed = asyncio.Event()

    @classmethod
    async def dial(cls, protocol: Mqtt, profile: str, memory: MqttMemory | None = None) -> Driver:
        """Connect, send the greeting, and wait until the link is ready or closed."""
        driver = cls(protocol, profile, memory if memory is not None else protocol.remember())
        driver.transport = await protocol.endpoint.dial(driver)
        driver.write(driver.dialogue.hello())
        await driver.until(lambda: driver.of(Ready) or driver.of(Closing))
        return driver

    def received(self, data: bytes) -> None:
        """Feed received bytes to the dialogue."""
        for event in self.dialogue.feed(data):
            self.events.append(event)
            if isinstance(event, Greeting):
                self.write(event.data)
            elif isinstance(event, Happening) and self.acknowledges:
                self.write(self.dialogue.acknowledge(event.token))
        self._changed.set()

    def lost(self, error: BaseException | None) -> None:
        """Record the end of the link."""
        self.lost_with.append(error)
        self._changed.set()

    def write(self, data: bytes) -> None:
        """Write bytes."""
        assert self.transport is not None
        self.transport.write(data)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(LIMIT):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> None:
        """Disconnect with a goodbye."""
        assert self.transport is not None
        self.write(self.dialogue.goodbye())
        self.transport.close()
        await self.until(lambda: self.lost_with)

    async def break_off(self) -> None:
        """Abort the connection without a goodbye."""
        assert self.transport is not None
        self.transport.abort()
        await self.until(lambda: self.lost_with)
