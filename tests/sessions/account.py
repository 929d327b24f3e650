"""A process with one session: `python account.py SETTINGS`, where the settings are a JSON object.

It connects, sends every few milliseconds, and reports each event as one JSON object a line.
A line on standard input makes it finish: it waits for its last outcomes, and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from moored.kernel import Backoff
from moored.sessions import AlreadyRunning, Incoming, Outgoing, Session, Sessions
from moored.sessions.mqtt import Mqtt


def report(what: str, **data: Any) -> None:
    """Print one report, and flush it."""
    sys.stdout.write(json.dumps({"what": what, **data}) + "\n")
    sys.stdout.flush()


def on_event(event: Incoming) -> None:
    """Report events of the session."""
    if event.type == "connection_update":
        kind = event.data.kind.name if event.data.kind else None
        report("update", state=event.data.state, kind=kind, reason=event.data.reason)
    else:
        report(event.type)


async def slow(outgoing: Outgoing, session: Any) -> Outgoing:
    """A step that takes time, so that some send is always unwritten."""
    await asyncio.sleep(0.2)
    return outgoing


async def send(session: Session, id: str, recipient: str) -> None:
    """Send, and report the outcome."""
    outcome = await session.send(recipient, id.encode(), id=id, outcome=True, timeout=100)
    report(
        "outcome", id=id, outcome=type(outcome).__name__, why=str(getattr(outcome, "reason", ""))
    )


async def main(settings: dict[str, Any]) -> None:
    """Run one account."""
    finish = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), finish.set)
    async with Sessions(
        leases=settings["leases"], lease_ttl=settings["ttl"], backoff=Backoff(0.05, 0.3)
    ) as sessions:
        # Each process has its own client id: only the lease keeps two of them apart.
        protocol = Mqtt(
            settings["broker"],
            client_id=settings["name"],
            subscribe=(),
            send_window=settings["send_window"],
        )
        while True:
            try:
                session = await sessions.connect(
                    "alice", protocol, on_event=on_event, steps=[("encrypt", slow)]
                )
                break
            except AlreadyRunning as error:
                report("already running", error=str(error))
                if not settings["retries"]:
                    return
                await asyncio.sleep(0.05)
        report("online", fence=session.fence)
        sends: list[asyncio.Task[None]] = []
        while not finish.is_set():
            id = f"{settings['name']}-{len(sends)}"
            sends.append(asyncio.create_task(send(session, id, f"bob/{len(sends) % 5}")))
            try:
                await asyncio.wait_for(finish.wait(), 0.01)
            except TimeoutError:
                pass
        await asyncio.gather(*sends)
        report("done", sends=len(sends), status=session.status())


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
