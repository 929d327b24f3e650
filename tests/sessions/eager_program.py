"""Sessions and leases where tasks are eager: run by every interpreter that has such tasks.

The scenarios need the standard library alone; see tests/kernel/eager_program.py.
"""

from __future__ import annotations

import asyncio

from tests.kernel.eager_program import play

from moored.leases import Leases, MemoryStore, Policy
from moored.sessions import Acked, Incoming, Sessions, Text
from moored.sessions.link._credentials import RECORD as CREDENTIALS
from moored.testing import session_sandbox
from moored.testing.demo import Demo, DemoServer


async def sends_are_confirmed_before_and_after_a_lost_link() -> None:
    server = DemoServer()
    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Demo(server))
        assert isinstance(await alice.send("bob", b"hello", outcome=True), Acked)
        server.cut("alice")
        sent = await alice.send(
            "bob", b"again", outcome=True, hold=True, idempotent=True, timeout=20
        )
        assert isinstance(sent, Acked), sent


async def every_event_reaches_the_handler() -> None:
    seen: list[str] = []

    def bot(event: Incoming) -> None:
        if event.type == "messages_upsert":
            seen.append(event.data.content.text)

    async with session_sandbox(on_event=bot) as sandbox:
        for text in "abc":
            await sandbox.receive(Text(text), timeout=2)
    assert seen == ["a", "b", "c"]


async def new_credentials_are_saved_each_time() -> None:
    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Demo(DemoServer()))
        for credentials in (b"first", b"second"):
            alice._runtime.credentials.keep(credentials)
            while alice._runtime.credentials.unsaved:  # noqa: ASYNC110 (no event says that they are saved)
                await asyncio.sleep(0.001)
            assert await alice.records.get(*CREDENTIALS) == credentials


async def leases_are_taken_and_given_back() -> None:
    store = MemoryStore()
    async with Leases(store, place="memory", service_name="orders", policy=Policy()) as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        await lease.renew()
        assert await leases.acquire("db", limit=1) is None
        await lease.release()
        assert await leases.acquire("db", limit=1) is not None


SCENARIOS = [
    sends_are_confirmed_before_and_after_a_lost_link,
    every_event_reaches_the_handler,
    new_credentials_are_saved_each_time,
    leases_are_taken_and_given_back,
]


def main() -> None:
    for scenario in SCENARIOS:
        asyncio.run(play(scenario))


if __name__ == "__main__":
    main()
