"""An app with a broker, and nothing that drains it: for any ASGI server, and for `moored serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Mount
from tests.broker.serving import ACME, KEYS, OTHER

from moored.app import App, ComponentContext
from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource

#: Fills the socket of a client that does not read, and its buffer in the server, at once.
LARGE = json.dumps({"org_id": OTHER, "text": "x" * 500_000})


async def publish(source: MemorySource, broker: Broker) -> None:
    """Publish events without end; report when both clients of a tenant have stopped reading."""
    stalled = 0
    while True:
        if broker.statistics().dropped.get("slow", 0) < 2:
            source.publish("orders", LARGE)
        elif not stalled:
            stalled = 1
            print("clients are stalled", flush=True)  # noqa: T201
        source.publish("orders", json.dumps({"org_id": ACME}))
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


#: The same for `moored serve`.
service = App("stopping")
served = MemorySource()
serving = service.broker(
    served, authenticate=ApiKeys(KEYS), channels=["orders"], buffer=1, slow="drop"
)


@service.component
async def publisher(ctx: ComponentContext) -> None:
    await publish(served, serving)
