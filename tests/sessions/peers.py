"""An independent client, on the other side of the broker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiomqtt
from tests.sessions.mosquitto import Mosquitto

__all__ = ["peer"]


@contextlib.asynccontextmanager
async def peer(broker: Mosquitto) -> AsyncIterator[aiomqtt.Client]:
    version = aiomqtt.ProtocolVersion.V5
    async with aiomqtt.Client("127.0.0.1", broker.port, protocol=version) as client:
        yield client
