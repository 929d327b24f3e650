"""An app with a broker, and nothing that drains it, for any ASGI server.

Each server imports it in processes of its own: it imports little.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Mount

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource

KEYS = {"acme-key": "acme", "other-key": "other"}
#: Fills the socket of a client that does not read, and its buffer in the server, at once.
LARGE = json.dumps({"org_id": "other", "text": "x" * 500_000})


async def publish(source: MemorySource, broker: Broker) -> None:
    """Publish events without end; report when both clients of a tenant have stopped reading."""
    stalled = 0
    while True:
        if broker.statistics().dropped.get("slow", 0) < 2:
            source.publish("orders", LARGE)
        elif not stalled:
            stalled = 1
            print("clients are stalled", flush=True)  # noqa: T201
        source.publish("orders", json.dumps({"org_id": "acme"}))
        await asyncio.sleep(0.02)


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    source = MemorySource()
    broker = Broker(source, channels=["orders"], buffer=1, slow="drop")
    app.routes.append(Mount("/", BrokerApp(broker, ApiKeys(KEYS))))
    async with broker:
        publishing = asyncio.create_task(publish(source, broker))
        yield
        publishing.cancel()
    print("the lifespan has ended", flush=True)  # noqa: T201


app = Starlette(lifespan=lifespan)
