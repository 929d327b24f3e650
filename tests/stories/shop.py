"""The service of the stories: orders come in by HTTP, and go to a copy and to browsers."""

from __future__ import annotations

import os
from uuid import UUID

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

import moored
from moored.broker import Identity
from moored.postgres import Reset, Transaction

COPY = "insert into copies values (%s, %s) on conflict (id) do update set times = copies.times + 1"
#: Park what the copy cannot handle, and do not count the copy towards readiness, the default.
PARK = "PARK" in os.environ

app = moored.App("shop")
db = app.pool(os.environ["DATABASE_URL"], name="db", max_size=4)
pg = app.postgres(
    os.environ["DATABASE_URL"],
    replication_url=os.environ.get("DIRECT_URL"),
    notify_url=os.environ.get("DIRECT_URL"),
    state_dir=os.environ["STATE_DIR"],
    pool_size=4,
)


async def authenticate(token: str) -> Identity | None:
    """Every UUID is the token of the tenant with this id."""
    return Identity(str(UUID(token)))


app.broker(pg.outbox, channels=["orders"], authenticate=authenticate, required=True)


@app.consumer(
    pg,
    "copy",
    tables=["orders"],
    after=["db"],
    required=not PARK,
    on_poison="park" if PARK else "stop",
)
async def copy(txn: Transaction | Reset) -> None:
    """Write each order to another table, and count how often."""
    async with db.connection() as conn:
        if isinstance(txn, Reset):
            await conn.execute("insert into resets values (%s)", [txn.reason])
            await conn.execute("insert into copies select id, 0 from orders on conflict do nothing")
            return
        for change in txn:
            if change.new is not None:
                await conn.execute(COPY, [change.new["id"], 1])


async def order(request: Request) -> Response:
    values = [request.path_params["number"], UUID(request.query_params["org"])]
    async with db.connection() as conn:
        await conn.execute("insert into orders values (%s, %s)", values)
    return Response()


routes = [Route("/orders/{number:int}", order, methods=["POST"]), Mount("/", app.asgi)]
api = Starlette(routes=routes, lifespan=app.lifespan)
