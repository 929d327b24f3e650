"""A protocol that resumes, over links that are cut: every send arrives once, and no more."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from tests.sessions.storm import Faults, Storm
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Acked, Incoming, Session, Sessions, Tcp, Unknown
from moored.testing import FaultProxy, base_seed, scaled
from moored.testing.demo import Demo, DemoServer

SENDS = scaled(1000, least=200)
CUTS = scaled(20, least=5)
RECIPIENTS = 50
#: How many of the recipients are there, over links that are cut as well.
PRESENT = 3
#: How long one of these takes for a message, in seconds.
SLOWLY = 0.02


def ids_in_mail(server: DemoServer, name: str) -> list[str]:
    """What the server keeps for somebody, in its order, as often as it was posted."""
    return [frame["id"] for frame in server.world.account(name).mail.values()]


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("window", [None, 8])
async def test_every_send_arrives_once_over_links_that_are_cut(
    cumulative: bool, window: int | None
) -> None:
    rng = random.Random(base_seed() + cumulative)
    server = DemoServer(window=window)
    names = [f"to/{number}" for number in range(RECIPIENTS)]
    for name in names:
        server.world.account(name)  # so that there is mail for them
    tcp = await server.serve()
    heard: defaultdict[str, list[str]] = defaultdict(list)
    over: Counter[tuple[str, int, str]] = Counter()
    backlog: Counter[str] = Counter()

    async def hear(event: Incoming) -> None:
        # So slowly that others wait behind it, of which a lost link must not make two.
        if event.type == "messages_upsert":
            name, id = event.profile, event.data.id
            heard[name].append(id)
            over[name, sessions.via(name).generation, id] += 1
            backlog[name] = max(backlog[name], server.mail(name))
            await asyncio.sleep(SLOWLY)

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

        for name in names[:PRESENT]:
            await connect(name, on_event=hear)
        session = await connect("alice")
        storm = Storm(session, rng)
        await storm.run(SENDS, [Faults(proxy, session, storm, rng)] * CUTS)
        assert session.status()["reconnects"] >= CUTS
        # The server always knows the session, so it says what became of each one in the end.
        assert storm.counts()["Unknown"] == 0
        assert storm.counts()["Acked"] > SENDS / 4

        # What has come to those who were there is acknowledged when they have handled it.
        await until(lambda: not any(server.mail(name) for name in names[:PRESENT]))
        await storm.last("to/0")
        lost, again = storm.check(
            lambda name: heard[name] if name in names[:PRESENT] else ids_in_mail(server, name)
        )
        assert lost == 0
        for name in names[PRESENT:]:
            posted = ids_in_mail(server, name)
            assert len(posted) == len(set(posted)), "the server has posted one twice"
        sent_again = sum(each.duplicates for each in server.received)
        assert sent_again > 0, "nothing had to be sent again: the links were cut too gently"
        # And what came again to those who were there: each at most once over each new link, and no
        # more than the server had unacknowledged.
        assert set(over.values()) <= {1}, f"twice over one link: {over.most_common(3)}"
        most = {
            name: backlog[name] * sessions.via(name).status()["reconnects"]
            for name in names[:PRESENT]
        }
        assert again <= sum(most.values()), f"{again} came again: {most}"


@pytest.mark.parametrize("cumulative", [False, True])
async def test_a_send_that_timed_out_is_not_written_again(cumulative: bool) -> None:
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
