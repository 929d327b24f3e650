"""An app with 1,000 sessions, and the server of their accounts."""

from __future__ import annotations

import asyncio

import moored
from moored.app import ComponentContext
from moored.testing.demo import Demo, DemoServer

__all__ = ["SESSIONS", "app"]

SESSIONS = 1000

app = moored.App("crowd")
# The sign-in takes longer than the time after which missing sessions are an incident.
accounts = app.sessions(name="chat", connect_rate=200, connect_burst=50)
server = DemoServer()


@app.component(after=["chat"])
async def sign_in(ctx: ComponentContext) -> None:
    """Start a session for each account."""
    for number in range(SESSIONS):
        await accounts.start(f"account-{number}", Demo(server), on_event=lambda event: None)
    await asyncio.Event().wait()
