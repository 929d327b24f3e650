"""One process with a session: `python account.py ORDER`, where the order is a JSON object.

It connects, sends something every few milliseconds, and tells everything, one JSON object a line.
What it is told on standard input is that it may finish: it then waits for its last outcomes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from moored.kernel import Backoff
from moored.sessions import AlreadyRunning, Incoming, Outgoing, Session, Sessions
from moored.sessions.mqtt import Mqtt


def tell(what: str, **data: Any) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps({"what": what, **data}) + "\n")
    sys.stdout.flush()


def on_event(event: Incoming) -> None:
    """Tell what becomes of the connection."""
    if event.type == "connection_update":
        kind = event.data.kind.name if event.data.kind else None
        tell("update", state=event.data.state, kind=kind, reason=event.data.reason)
    else:
        tell(event.type)


async def slow(outgoing: Outgoing, session: Any) -> Outgoing:
    """A step that takes time, so that there is always something that has not been written."""
    await asyncio.sleep(0.2)
    return outgoing


async def send(session: Session, id: str, recipient: str) -> None:
    """Send, and tell the outcome."""
    outcome = await session.send(recipient, id.encode(), id=id, outcome=True, timeout=100)
    tell("outcome", id=id, outcome=type(outcome).__name__, why=str(getattr(outcome, "reason", "")))


async def main(order: dict[str, Any]) -> None:
    """Play one account."""
    finish = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), finish.set)
    async with Sessions(
        leases=order["leases"], lease_ttl=order["ttl"], backoff=Backoff(0.05, 0.3)
    ) as sessions:
        # Whoever it is to the broker: only the lease keeps two of them apart.
        protocol = Mqtt(
            order["broker"],
            client_id=order["name"],
            subscribe=(),
            send_window=order["send_window"],
        )
        while True:
            try:
                session = await sessions.connect(
                    "alice", protocol, on_event=on_event, steps=[("encrypt", slow)]
                )
                break
            except AlreadyRunning as error:
                tell("already running", error=str(error))
                if not order["insists"]:
                    return
                await asyncio.sleep(0.05)
        tell("online", fence=session.fence)
        sends: list[asyncio.Task[None]] = []
        while not finish.is_set():
            id = f"{order['name']}-{len(sends)}"
            sends.append(asyncio.create_task(send(session, id, f"bob/{len(sends) % 5}")))
            try:
                await asyncio.wait_for(finish.wait(), 0.01)
            except TimeoutError:
                pass
        await asyncio.gather(*sends)
        tell("done", sends=len(sends), status=session.status())


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
