"""With a protocol that resumes, every send arrives exactly once over links that are cut."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from tests.sessions.send_load import LinkFaults, SendLoad
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Acked, Incoming, Session, Sessions, Tcp, Unknown
from moored.testing import FaultProxy, base_seed, scaled
from moored.testing.demo import Demo, DemoServer

SENDS = scaled(1000, least=200)
CUTS = scaled(20, least=5)
RECIPIENTS = 50
#: How many of the recipients are connected, over links that are cut as well.
CONNECTED = 3
#: How long a connected recipient takes to handle a message, in seconds.
HANDLING_TIME = 0.02


def ids_in_mail(server: DemoServer, name: str) -> list[str]:
    """Return the ids in the server's mail for an account, in order, with repetitions."""
    return [frame["id"] for frame in server.world.account(name).mail.values()]


@pytest.mark.parametrize(
    ("window", "cumulative"),
    [
        (None, True),
        (8, False),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((None, False), (8, True))),
    ],
)
async def test_every_send_arrives_once_over_links_that_are_cut(
    cumulative: bool, window: int | None
) -> None:
    rng = random.Random(base_seed() + cumulative)
    server = DemoServer(window=window)
    names = [f"to/{number}" for number in range(RECIPIENTS)]
    for name in names:
        server.world.account(name)  # so that the server keeps mail for it
    tcp = await server.serve()
    received: defaultdict[str, list[str]] = defaultdict(list)
    times_per_link: Counter[tuple[str, int, str]] = Counter()
    backlog: Counter[str] = Counter()

    async def handle(event: Incoming) -> None:
        # Slow, so that messages queue behind it; a lost link must not duplicate those.
        if event.type == "messages_upsert":
            name, id = event.profile, event.data.id
            received[name].append(id)
            times_per_link[name, sessions.via(name).generation, id] += 1
            backlog[name] = max(backlog[name], server.mail(name))
            await asyncio.sleep(HANDLING_TIME)

    async with (
        server,
        FaultProxy(tcp.host, tcp.port) as proxy,
        Sessions(backoff=Backoff(0.01, 0.1), connect_rate=1000) as sessions,
    ):

        async def connect(name: str, **options: Any) -> Session:
            endpoint = Tcp("127.0.0.1", proxy.port)
            protocol = Demo(
                endpoint, resume=True, cumulative=cumulative, keepalive=1.0, patience=1.0
            )
            return await sessions.connect(name, protocol, **options)

        for name in names[:CONNECTED]:
            await connect(name, on_event=handle)
        session = await connect("alice")
        load = SendLoad(session, rng)
        faults = LinkFaults(proxy, session, load, rng)
        await load.run(SENDS, [faults] * CUTS)
        while not any(each.duplicates for each in server.received):
            await load.run(CUTS, [faults])  # until a fault has hit a send that was received
        assert session.status()["reconnects"] >= CUTS
        # The server always resumes the session, so every send has a definite outcome.
        assert load.counts()["Unknown"] == 0
        assert load.counts()["Acked"] > SENDS / 4

        # A message to a connected recipient is acknowledged when it has been handled.
        await until(lambda: not any(server.mail(name) for name in names[:CONNECTED]))
        await load.last("to/0")
        lost, again = load.check(
            lambda name: received[name] if name in names[:CONNECTED] else ids_in_mail(server, name)
        )
        assert lost == 0
        for name in names[CONNECTED:]:
            posted = ids_in_mail(server, name)
            assert len(posted) == len(set(posted)), "the server has stored a send twice"
        # A connected recipient gets a message at most once over each link, and no more repetitions
        # than the server had unacknowledged messages.
        assert set(times_per_link.values()) <= {1}, (
            f"twice over one link:  {times_per_link.most_common(3)}"
        )
        most = {
            name: backlog[name] * sessions.via(name).status()["reconnects"]
            for name in names[:CONNECTED]
        }
        assert again <= sum(most.values()), f"{again} came again: {most}"


@pytest.mark.parametrize("cumulative", [False, True])
async def test_send_that_timed_out_is_not_written_again(cumulative: bool) -> None:
    server = DemoServer()
    async with Sessions(backoff=Backoff(0.01, 0.1)) as sessions:
        protocol = Demo(server, resume=True, cumulative=cumulative)
        alice = await sessions.connect("alice", protocol)
        server.drop_acks = 1
        late = await alice.send("bob", b"", id="late", outcome=True, timeout=0.05)
        assert isinstance(late, Unknown)
        server.cut("alice")
        await until(lambda: alice.generation == 2 and alice.state == "online")
        assert isinstance(await alice.send("bob", b"", id="after"), Acked)
        assert [(each.id, each.duplicates) for each in server.received] == [
            ("late", 0),
            ("after", 0),
        ]
