"""The four outcomes of a send, each caused on purpose, with a server in this process.

Expected output:

    confirmed
    rejected: 463 (no such account)
    safe to send again: the session of 'alice' is offline/resting: the user disconnected it
    may have been delivered: the link was lost: …
"""

from __future__ import annotations

import asyncio

from moored.sessions import Acked, NotSent, Outcome, Rejected, Sessions, Unknown
from moored.testing.demo import Demo, DemoServer


def words(outcome: Outcome) -> str:
    match outcome:
        case Acked():
            return "confirmed"
        case Rejected(code=code, reason=reason):
            return f"rejected: {code} ({reason})"
        case NotSent(reason=reason):
            return f"safe to send again: {reason}"
        case Unknown(reason=reason):
            return f"may have been delivered: {reason}"


async def main() -> None:
    server = DemoServer()
    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Demo(server))
        print(words(await alice.send("bob", b"hello", outcome=True)))

        server.reject("eve", 463, "no such account")
        print(words(await alice.send("eve", b"hello", outcome=True)))

        await alice.disconnect()
        print(words(await alice.send("bob", b"hello", outcome=True)))

        await alice.connect()
        server.drop_acks = 1  # the server receives the message; its ack is lost
        sending = asyncio.create_task(alice.send("bob", b"hello", outcome=True))
        while len(server.received) < 2:  # noqa: ASYNC110 (the server has no event for it)
            await asyncio.sleep(0)
        server.cut("alice")
        print(words(await sending))


if __name__ == "__main__":
    asyncio.run(main())
