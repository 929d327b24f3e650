"""A whole service: pool, change stream, listener, live events, gRPC and a component, in FastAPI.

Run it: `MOORED_ADMIN_TOKEN=… DATABASE_URL=postgresql://… PRICES=host:port uvicorn
orders_service:api`. The page is at http://127.0.0.1:8000/moored/?token=…, live events for the token
"key-of-acme" at /moored/v1/subscribe.
"""

from __future__ import annotations

import os
from collections import Counter

from fastapi import FastAPI

import moored
from moored.app import ComponentContext
from moored.broker import ApiKeys
from moored.postgres import Notification, Outbox, Reset, Transaction

URL = os.environ["DATABASE_URL"]
ACME = "11111111-1111-1111-1111-111111111111"
TABLE, COLUMNS = "create table if not exists", "(id int primary key, org_id uuid, item text)"
ADD = "insert into search values (%s, %s, %s) on conflict do nothing"

app = moored.App("orders")
db = app.pool(URL, name="db", max_size=10, creation_rate=20)
pg = app.postgres(URL, notify_url=URL, state_dir=os.environ.get("STATE_DIR", "state"))
prices = app.channel(os.environ["PRICES"], name="prices")
price_of = prices.unary_unary("/shop.Prices/Get")  # or a generated stub: PricesStub(prices)


@app.component(once=True, after=["db"])
async def schema(ctx: ComponentContext) -> None:
    """Create what the service needs; the parts after it wait until this has returned."""
    async with db.connection() as conn:
        await conn.execute("select pg_advisory_xact_lock(1)")  # several workers start at once
        await conn.execute(f"{TABLE} orders {COLUMNS}; {TABLE} search {COLUMNS}")
    await Outbox(db).install()
    await Outbox(db).capture("orders", tenant_column="org_id")


keys = ApiKeys({"key-of-acme": ACME})
live = app.broker(pg.outbox, channels=["orders"], after=["schema"], authenticate=keys)


@app.consumer(pg, "search", tables=["orders"], after=["schema"])
async def index(txn: Transaction | Reset) -> None:
    """Called for each transaction, which is acknowledged when this returns."""
    async with db.connection() as conn:
        if isinstance(txn, Reset):
            await conn.execute("truncate search")
            await conn.execute("insert into search table orders")
            return
        for change in txn:
            if change.new:
                await conn.execute(ADD, [*change.new.values()])


@app.component(after=["db"])
async def popular(ctx: ComponentContext) -> None:
    """Count the ordered items by notifications; restarted when it fails, shown like the others."""
    ordered = Counter[str]()
    ctx.show(lambda: {"ordered": ordered})
    assert pg.listener is not None
    async with pg.listener.subscribe("ordered") as events:
        async for event in events:
            if isinstance(event, Notification):
                ordered[event.payload] += 1


api = FastAPI(lifespan=app.lifespan)
api.mount("/moored", app.asgi)


@api.post("/orders/{number}")
async def order(number: int, item: str) -> str:
    price: bytes = await price_of(item.encode(), timeout=30)
    async with db.connection() as conn:
        await conn.execute("insert into orders values (%s, %s, %s)", (number, ACME, item))
        await conn.execute("select pg_notify('ordered', %s)", (item,))
    return f"{item} for {price.decode()}"
