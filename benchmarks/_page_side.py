"""A service with as many parts, or as many sessions, as the environment says."""

from __future__ import annotations

import asyncio
import os
from itertools import count

import moored
from moored.app import ComponentContext
from moored.testing.demo import Demo, DemoServer

PARTS, SESSIONS = int(os.environ.get("PARTS", "0")), int(os.environ.get("SESSIONS", "0"))

app = moored.App("many")


async def work(ctx: ComponentContext) -> None:
    """Count on: a part whose numbers change at each tick."""
    turns = count()
    ctx.show(lambda: {"counters": {"turns": next(turns)}})
    await asyncio.Event().wait()


for number in range(PARTS):
    app.component(name=f"worker-{number}", kind=f"worker of group {number % 25}")(work)

if SESSIONS:
    accounts = app.sessions(name="chat", connect_rate=SESSIONS / 4, connect_burst=SESSIONS // 20)
    server = DemoServer()

    @app.component(after=["chat"])
    async def sign_in(ctx: ComponentContext) -> None:
        """Keep a session for each account."""
        started = [
            await accounts.start(f"account-{each}", Demo(server), on_event=lambda event: None)
            for each in range(SESSIONS)
        ]
        await asyncio.gather(*(each.online() for each in started))
        await asyncio.Event().wait()
