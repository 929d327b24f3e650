"""Writers whose transactions commit out of order, and what three kinds of readers miss of them.

In one run: consumers of the outbox, a bare LISTEN that reconnects, and a cursor on the id alone.
The connections that listen are killed at random. The test and the benchmark use it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from moored.kernel import Tasks
from moored.postgres import Reset
from moored.postgres.listen import Gap, Listener
from moored.postgres.outbox import Outbox

__all__ = ["WRITERS", "Found", "gap_run"]

WRITERS = 8
#: Seconds that a transaction is open, at most.
OPEN = 0.03
CONSUMERS = ("one", "two")
#: How long everything may take after the last commit, in seconds.
LIMIT = 120.0
_LISTENER, _BARE = "gap-listener", "gap-bare"


@dataclass
class Found:
    """What was published, and how often each reader got it."""

    published: set[str] = field(default_factory=set)
    consumers: dict[str, Counter[str]] = field(default_factory=dict)
    orders: dict[str, list[int]] = field(default_factory=dict)
    bare: set[str] = field(default_factory=set)
    by_id: set[str] = field(default_factory=set)
    #: How often the connection of the listener was killed.
    kills: int = 0
    #: Gaps that a subscriber of the listener was told of, and holes that it was not told of.
    gaps: int = 0
    untold: int = 0

    @property
    def missed(self) -> int:
        """Events that a consumer of the outbox did not get."""
        return sum(len(self.published - set(each)) for each in self.consumers.values())

    @property
    def duplicates(self) -> int:
        """Events that a consumer of the outbox got again."""
        return sum(sum(each.values()) - len(each) for each in self.consumers.values())

    @property
    def bare_missed(self) -> int:
        """Events that a bare LISTEN did not get."""
        return len(self.published - self.bare)

    @property
    def id_cursor_missed(self) -> int:
        """Events that a reader with a cursor on the id did not get."""
        return len(self.published - self.by_id)


async def gap_run(url: str, events: int, kills: int, seed: int) -> Found:
    """Publish at least so many events by 8 writers, until the listener was killed often enough."""
    found, least = Found(), math.ceil(events / WRITERS)
    tasks = Tasks()
    async with (
        Listener(_named(url, _LISTENER)) as listener,
        Outbox(url, listener=listener) as outbox,
    ):
        await listener.wait_until_up(LIMIT)
        ready = [asyncio.Event() for _ in range(3)]
        for name in CONSUMERS:
            tasks.start(_consume(outbox, name, found))
        tasks.start(_subscribe(listener, found, ready[2]))
        tasks.start(_bare(_named(url, _BARE), found, ready[0]))
        tasks.start(_by_id(url, found, ready[1]))
        for each in ready:
            await each.wait()
        killer = tasks.start(_kill(url, kills, found, random.Random(seed)))
        await asyncio.gather(
            *(_write(url, n, least, killer, found, seed + n) for n in range(WRITERS))
        )
        await killer
        async with asyncio.timeout(LIMIT):
            while found.missed or not found.gaps:  # noqa: ASYNC110 - tasks here make it so
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # for the other two readers, and for repetitions
        failed = [task for task in tasks if task.done()]
        await tasks.cancel()
    assert not failed, failed
    return found


def _named(url: str, name: str) -> str:
    return psycopg.conninfo.make_conninfo(url, application_name=name)


async def _write(
    url: str, writer: int, least: int, killer: asyncio.Task[None], found: Found, seed: int
) -> None:
    chance = random.Random(seed)
    async with await psycopg.AsyncConnection.connect(url) as conn:
        number = 0
        while number < least or not killer.done():
            text = f"{writer}/{number}"
            number += 1
            for rolled_back in (chance.random() < 0.1, False):
                await conn.execute("select moored.outbox_publish('orders', %s)", [text])
                await conn.execute("select pg_notify('bare', %s)", [text])
                await asyncio.sleep(chance.uniform(0, OPEN))
                if not rolled_back:
                    break
                await conn.rollback()
            await conn.commit()
            found.published.add(text)


async def _consume(outbox: Outbox, name: str, found: Found) -> None:
    counter = found.consumers[name] = Counter()
    order = found.orders[name] = []
    async with outbox.consume(name) as consumer:
        async for event in consumer:
            assert not isinstance(event, Reset), event
            counter[event.payload] += 1
            order.append(event.id)
            await event.ack()


async def _subscribe(listener: Listener, found: Found, ready: asyncio.Event) -> None:
    # The last number of each writer, and how many gaps were reported before it.
    last: dict[str, tuple[int, int]] = {}
    async with listener.subscribe("bare", buffer=100_000) as subscription:
        ready.set()
        async for event in subscription:
            if isinstance(event, Gap):
                found.gaps += 1
                continue
            writer, _, text = event.payload.partition("/")
            number, gaps = last.get(writer, (-1, 0))
            found.untold += int(text) > number + 1 and gaps == found.gaps
            last[writer] = int(text), found.gaps


async def _bare(url: str, found: Found, ready: asyncio.Event) -> None:
    """What programs without an outbox do: LISTEN, and reconnect a little later."""
    while True:
        with suppress(psycopg.OperationalError):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                await conn.execute("listen bare")
                ready.set()
                async for notification in conn.notifies():
                    found.bare.add(notification.payload)
        await asyncio.sleep(0.1)


async def _by_id(url: str, found: Found, ready: asyncio.Event) -> None:
    """What programs with a simple outbox do: read everything after the last id."""
    last = 0
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        ready.set()
        while True:
            query = "select id, payload from moored.outbox where id > %s order by id"
            rows: list[Any] = await (await conn.execute(query, [last])).fetchall()
            for last, payload in rows:  # noqa: B007 - the last one is kept
                found.by_id.add(payload)
            await asyncio.sleep(0.005)


async def _kill(url: str, kills: int, found: Found, chance: random.Random) -> None:
    query = (
        "select application_name, pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = any(%s) and datname = current_database()"
    )
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        while found.kills < kills:
            await asyncio.sleep(chance.uniform(0.05, 0.5))
            rows = await (await conn.execute(query, [[_LISTENER, _BARE]])).fetchall()
            found.kills += any(name == _LISTENER for name, _ in rows)
