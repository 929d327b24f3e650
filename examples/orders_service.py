"""A whole service: a pool, a change stream, live events and a component of its own, in FastAPI.

Run it with a database: `DATABASE_URL=postgresql://… uvicorn orders_service:api`, then open
http://127.0.0.1:8000/moored/ for the page, or `curl -H 'Authorization: Bearer key-of-acme'
http://127.0.0.1:8000/moored/v1/subscribe` for the live events of a tenant.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import moored
from moored.app import ComponentContext
from moored.broker import ApiKeys
from moored.postgres import Reset, Transaction

URL = os.environ["DATABASE_URL"]
ACME = "11111111-1111-1111-1111-111111111111"

app = moored.App("orders")
db = app.pool(URL, name="db", max_size=10, creation_rate=20)
pg = app.postgres(URL, pool_size=4, state_dir=os.environ.get("STATE_DIR", "state"))
indexed: set[int] = set()


@app.component(once=True, after=["db", "postgres"])
async def schema(ctx: ComponentContext) -> None:
    """Create what the service needs; the parts after it wait until this has returned."""
    async with db.connection() as conn:
        await conn.execute(
            "create table if not exists orders (id int primary key, org_id uuid, item text)"
        )
    await pg.outbox.install()
    await pg.outbox.capture("orders", tenant_column="org_id")


live = app.broker(
    pg, channels=["orders"], after=["schema"], authenticate=ApiKeys({"key-of-acme": ACME})
)


@app.consumer(pg, "search", tables=["orders"], after=["schema"])
async def index(txn: Transaction | Reset) -> None:
    """Called for each transaction, which is acknowledged when this returns."""
    if isinstance(txn, Reset):
        indexed.clear()
        return
    indexed.update(change.new["id"] for change in txn if change.new)


@app.component(after=["schema"])
async def stock(ctx: ComponentContext) -> None:
    """A component of our own: restarted when it fails, shown like the others."""
    counted = 0
    ctx.show(lambda: {"orders": counted})
    while True:
        async with db.connection() as conn:
            row = await (await conn.execute("select count(*) from orders")).fetchone()
        counted = row[0] if row else 0
        await asyncio.sleep(1)


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with app:
        yield


api = FastAPI(lifespan=lifespan)
api.mount("/moored", app.asgi)


@api.post("/orders/{number}")
async def order(number: int, item: str) -> dict[str, int]:
    async with db.connection() as conn:
        await conn.execute("insert into orders values (%s, %s, %s)", (number, ACME, item))
        await conn.execute("select pg_sleep(0.2)")
    return {"id": number}


@api.get("/indexed")
async def found() -> list[int]:
    return sorted(indexed)
