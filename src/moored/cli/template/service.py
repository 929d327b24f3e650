"""my-service: takes orders over HTTP, packs them in a consumer, and shows them live to browsers."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import moored
from moored.app import ComponentContext
from moored.broker import ApiKeys
from moored.postgres import Reset, Transaction

URL = os.environ["DATABASE_URL"]

app = moored.App("my-service")
db = app.pool(URL, name="db", max_size=10)
pg = app.postgres(URL)


@app.component(once=True, after=["db", "postgres"])
async def schema(ctx: ComponentContext) -> None:
    """Create the table, one replica at a time, and publish its changes; the parts below wait."""
    async with db.connection() as conn:
        await conn.execute("""select pg_advisory_xact_lock(1); create table if not exists orders (
            id bigint generated always as identity primary key,
            tenant text not null, item text not null, packed boolean not null default false)""")
    await pg.outbox.install()
    await pg.outbox.capture("orders", tenant_column="tenant")


keys = ApiKeys({"key-of-acme": "acme"})  # or Jwt(…): a browser sees the changes of its tenant
app.broker(pg.outbox, channels=["orders"], after=["schema"], authenticate=keys, required=True)


@app.consumer(pg, "packer", tables=["orders"], after=["schema"], required=True)
async def pack(txn: Transaction | Reset) -> None:
    """Called for each committed transaction, and again with the same one until it succeeds."""
    async with db.connection() as conn:
        if isinstance(txn, Reset):  # changes may be missing: the table has what is left to do
            await conn.execute("update orders set packed = true where not packed")
            return
        for change in txn:
            if change.kind == "insert" and change.new:
                number = change.new["id"]
                await conn.execute("update orders set packed = true where id = %s", [number])


async def order(request: Request) -> JSONResponse:
    item = request.path_params["item"]
    async with db.connection() as conn:  # commits at its end
        await conn.execute("insert into orders (tenant, item) values ('acme', %s)", [item])
    return JSONResponse({"ordered": item}, status_code=201)


routes = [Route("/orders/{item}", order, methods=["POST"]), Mount("/moored", app.asgi)]
api = Starlette(routes=routes, lifespan=app.lifespan)
