"""An app with many sessions, 2,000 at full scale, and the server of their accounts."""

from __future__ import annotations

import asyncio

import moored
from moored.app import ComponentContext
from moored.testing import scaled
from moored.testing.demo import Demo, DemoServer

__all__ = ["SESSIONS", "app"]

SESSIONS = scaled(2000, least=200)

app = moored.App("crowd")
# The sign-in takes longer than the time after which missing sessions are an incident.
accounts = app.sessions(name="chat", connect_rate=SESSIONS / 10, connect_burst=SESSIONS // 20)
server = DemoServer()


@app.component(after=["chat"])
async def sign_in(ctx: ComponentContext) -> None:
    """Start a session for each account, and report when all are online."""
    started = [
        await accounts.start(f"account-{number}", Demo(server), on_event=lambda event: None)
        for number in range(SESSIONS)
    ]
    await asyncio.gather(*(each.online() for each in started))
    print("all sessions are online", flush=True)  # noqa: T201 (the test waits for it)
    await asyncio.Event().wait()
