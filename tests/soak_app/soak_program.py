"""The service of the soak: an app with every kind of part, writers and senders inside it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import psutil
import psycopg

import moored
from moored.app import ComponentContext
from moored.broker import ApiKeys
from moored.kernel import Tasks
from moored.postgres import Outbox, Reset, Transaction
from moored.service import Config
from moored.sessions import Acked, Session
from moored.sessions.transport import Tcp
from moored.testing.demo import Demo

given: dict[str, Any] = json.loads(sys.argv[1])
folder = Path(given["folder"])
TENANTS: list[str] = given["tenants"]
COPY = "insert into copies values (%s, %s) on conflict do nothing"

config = Config(port=given["port"], no_token=True, log_level="warning")
app = moored.App("soak", config=config)
db = app.pool(given["url"], name="db", max_size=10, check_idle=1.0)
pg = app.postgres(given["url"], notify_url=given["url"], state_dir=folder)
echo = app.channel(f"127.0.0.1:{given['grpc']}", name="echo").unary_unary("/test.Echo/Echo")
accounts = app.sessions(storage=str(folder / "accounts.db"))


@app.component(once=True, after=["db"])
async def schema(ctx: ComponentContext) -> None:
    async with db.connection() as conn:
        for table in ("orders", "copies"):
            await conn.execute(f"create table if not exists {table} (id int primary key, org text)")
    await Outbox(db).install()
    await Outbox(db).capture("orders", tenant_column="org")


app.broker(
    pg.outbox,
    channels=["orders"],
    after=["schema"],
    authenticate=ApiKeys({each: each for each in TENANTS}),
)


@app.consumer(pg, "copy", tables=["orders"], after=["schema"])
async def copy(txn: Transaction | Reset) -> None:
    if isinstance(txn, Reset):
        return
    async with db.connection() as conn:
        for change in txn:
            if change.new is not None:
                values = [change.new["id"], change.new["org"]]
                await conn.execute(COPY, values)


#: How often each call of the load has had which result.
results: Counter[str] = Counter()
unhandled: list[str] = []


async def repeat(
    call: Callable[[int], Awaitable[None]], number: int, of: int, every: float
) -> None:
    """Call with number, number + of, … at random intervals, until the load ends."""
    while not (folder / "until").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    until = float((folder / "until").read_text())
    while time.time() < until:
        await call(number)
        number += of
        await asyncio.sleep(random.uniform(0, 2 * every))


@app.component(after=["schema", "consumer-copy"])
async def writers(ctx: ComponentContext) -> None:
    async def write(number: int) -> None:
        try:
            async with db.connection(timeout=10) as conn:
                values = (number, random.choice(TENANTS))
                await conn.execute("insert into orders values (%s, %s)", values)
            results["written"] += 1
        except (psycopg.Error, OSError):
            results["not written"] += 1
        try:
            await echo(b"x", timeout=10)
            results["called"] += 1
        except grpc.RpcError:
            results["not called"] += 1

    count = given["writers"]
    # Numbers of an earlier run of this component are not used again.
    first = ctx.generation * 10_000_000
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(repeat(write, first + number, count, 0.5))


@app.component(after=["sessions"])
async def senders(ctx: ComponentContext) -> None:
    async def send_from(session: Session, number: int) -> None:
        results["sends"] += 1
        outcome = await session.send(f"peer-{number}", b"hello", outcome=True)
        results[type(outcome).__name__] += 1
        if isinstance(outcome, Acked):
            print(outcome.id, file=acked)

    async def read(session: Session) -> None:
        async for event in session.events():
            results[type(event).__name__] += 1

    endpoint, reading = Tcp("127.0.0.1", given["chat"]), Tasks()
    with (folder / "acked").open("a") as acked:
        async with asyncio.TaskGroup() as tasks:
            for number in range(given["sessions"]):
                session = await accounts.start(f"account-{number}", Demo(endpoint))
                tasks.create_task(repeat(partial(send_from, session), number, 1, 2.0))
                reading.start(read(session))


@app.component
async def probe(ctx: ComponentContext) -> None:
    loop, process = asyncio.get_running_loop(), psutil.Process()

    def figures() -> dict[str, Any]:
        return {
            "tasks": len(asyncio.all_tasks()),
            "descriptors": process.num_fds(),
            "online": sum(each.state == "online" for each in accounts),
            "unhandled": unhandled,
            "results": results,
            "recorder": app.recorder.statistics()._asdict(),
        }

    loop.set_exception_handler(lambda _, context: unhandled.append(str(context)))
    sys.unraisablehook = lambda found: unhandled.append(str(found))
    ctx.show(figures)
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(app.run())
