"""From an INSERT to a browser: a table's changes as server-sent events, for the tenant's clients.

A trigger writes every change of the table to the outbox, within the transaction of the change. The
broker sends each to the streams of its tenant. A client that was away resumes after its last event.

Expected output:

    orders: insert {'id': 1, 'org_id': '11111111-1111-1111-1111-111111111111', 'item': 'tea'}
    reconnected after its last event
    orders: insert {'id': 3, 'org_id': '11111111-1111-1111-1111-111111111111', 'item': 'jam'}
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import aclosing, asynccontextmanager

import psycopg
import uvicorn
from fastapi import FastAPI

from moored.broker import ApiKeys, Broker, BrokerApp
from moored.broker.client import ReceivedEvent, follow
from moored.broker.postgres import OutboxEvents
from moored.embedded import EmbeddedPostgres
from moored.postgres import Listener, Outbox

ACME, OTHER = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


def application(url: str) -> FastAPI:
    """The whole server: `GET /live/v1/subscribe` streams the changes of the table."""
    listener = Listener(url)
    outbox = Outbox(url, listener=listener)
    broker = Broker(OutboxEvents(outbox), channels=["orders"])

    @asynccontextmanager
    async def lifespan(app: FastAPI):  # type: ignore[no-untyped-def]
        async with listener, outbox, broker:
            yield

    app = FastAPI(lifespan=lifespan)
    app.state.broker = broker
    app.mount("/live", BrokerApp(broker, ApiKeys({"key-of-acme": ACME})))
    return app


async def main() -> None:
    async with EmbeddedPostgres() as server:
        await prepare(server.url)
        line = socket.create_server(("127.0.0.1", 0))
        app = application(server.url)
        web = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(web.serve(sockets=[line]))
        try:
            stream = f"http://127.0.0.1:{line.getsockname()[1]}/live/v1/subscribe"
            await use(server.url, stream, app.state.broker)
        finally:
            web.should_exit = True
            await serving


async def prepare(url: str) -> None:
    """Create the table and the outbox, and capture the table's changes."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute("create table orders (id int primary key, org_id uuid, item text)")
    async with Outbox(url, install=True) as outbox:
        await outbox.capture("orders", tenant_column="org_id")


async def use(url: str, stream: str, broker: Broker) -> None:
    """Insert orders of two tenants, and print what a client of one of them gets."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        async with aclosing(follow(stream, token="key-of-acme")) as events:
            first = asyncio.ensure_future(anext(events))
            while not broker.statistics().subscribers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await insert(conn, 1, ACME, "tea")
            last = show(await first)
        await insert(conn, 2, OTHER, "nuts")
        await insert(conn, 3, ACME, "jam")
        print("reconnected after its last event")
        async with aclosing(follow(stream, token="key-of-acme", after=last)) as events:
            show(await anext(events))


async def insert(conn: psycopg.AsyncConnection, number: int, org: str, item: str) -> None:
    await conn.execute("insert into orders values (%s, %s, %s)", (number, org, item))


def show(event: object) -> str:
    assert isinstance(event, ReceivedEvent)
    change = json.loads(event.data)
    print(f"{event.channel}: {change['op']} {change['new']}")
    return event.id or ""


if __name__ == "__main__":
    asyncio.run(main())
