"""A small steady load on all parts: its results show whether they work."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from moored.app import ComponentContext
from moored.broker import Broker, BrokerOff, LiveEvent, SlowSubscriber
from moored.kernel import Clock, raise_if_cancelled
from moored.postgres import Postgres, Reset, Transaction
from moored.reservoir import AsyncConnectionPool
from moored.sessions import Acked, Sessions, Text
from moored.testing.demo import Demo as ChatProtocol
from moored.testing.demo import DemoServer as ChatServer

__all__ = ["CHANNEL", "SIGN_IN_AFTER", "Load"]

PROFILES = tuple(f"account-{number:02}" for number in range(1, 21))
TENANTS = ("11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222")
CHANNEL = "orders"
#: Seconds between two pieces of work of one kind, and how many do it at once.
PAUSE = 0.2
WORKERS = 3
#: Seconds within which one piece of work must be served.
TIMEOUT = 10.0
#: Seconds until the demo signs in again to an account whose session was evicted.
SIGN_IN_AFTER = 2.0


class Load:
    """Writes, reads, calls and sends, each until its result is known."""

    def __init__(
        self,
        db: AsyncConnectionPool[Any],
        pg: Postgres,
        live: Broker,
        grpc: Any,
        sessions: Sessions,
        chat: ChatServer,
    ) -> None:
        self._db = db
        self._pg = pg
        self._live = live
        self._echo = None if grpc is None else grpc.unary_unary("/demo.Echo/Say")
        self._sessions = sessions
        self._chat = chat
        self._clock = Clock.system()
        self._random = random.Random()
        self._ids = itertools.count(int(self._clock.wall() * 1000))
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        #: By kind, when the newest work began that was served to its end.
        self.served: dict[str, float] = {}

    # -- results -------------------------------------------------------------------------------

    def served_since(self, moment: float) -> bool:
        """Whether work of each kind that began after this moment was served to its end."""
        return bool(self.served) and all(began > moment for began in self.served.values())

    def statistics(self) -> dict[str, Any]:
        """Return how much work was served, by kind."""
        return {"counters": dict(self._counts)}

    def costs(self) -> dict[str, int]:
        """Return how much work has failed, by kind."""
        return {f"{kind} failed": number for kind, number in self._failed.items()}

    # -- the work ------------------------------------------------------------------------------

    async def run(self, ctx: ComponentContext) -> None:
        """Run the load until this is cancelled."""
        ctx.show(self.statistics, costs=self.costs)
        for profile in PROFILES:
            if self._sessions.whereis(profile) is None:
                protocol = ChatProtocol(self._chat)
                await self._sessions.start(profile, protocol, on_event=lambda event: None)
        work = {"writes": self._write, "reads": self._read, "sends": self._send}
        if self._echo is not None:
            work["calls"] = self._call
        async with asyncio.TaskGroup() as group:
            for kind, once in work.items():
                for _ in range(WORKERS):
                    group.create_task(self._repeat(kind, once))
            for tenant in TENANTS:
                group.create_task(self._subscribe(tenant))
            for profile in PROFILES:
                group.create_task(self._stay_signed_in(profile))

    async def _repeat(self, kind: str, once: Callable[[float], Awaitable[bool]]) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * PAUSE * WORKERS)
            began = self._clock.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT):
                    served = await once(began)
            except Exception as error:
                raise_if_cancelled(error)
                served = False  # this counts as a cost; its reason is shown by its part
            if served:
                self._served(kind, began)
            elif kind != "sends":  # their outcomes are counted by the sessions
                self._failed[kind] += 1

    def _served(self, kind: str, began: float) -> None:
        self._counts[kind] += 1
        self.served[kind] = max(began, self.served.get(kind, 0.0))

    async def _write(self, began: float) -> bool:
        """Insert an order and publish an event, in one transaction."""
        order, tenant = next(self._ids), self._random.choice(TENANTS)
        async with self._db.connection() as conn:
            await conn.execute("insert into orders values (%s, %s)", (order, began))
            event = {"order": order, "began": began}
            await self._pg.outbox.publish(conn, CHANNEL, event, tenant=tenant)
        return True

    async def _read(self, began: float) -> bool:
        async with self._db.connection() as conn:
            await conn.execute("select id from orders order by id desc limit 10")
            await asyncio.sleep(self._random.uniform(0.05, 0.5))  # longer than a real query
        return True

    async def _call(self, began: float) -> bool:
        assert self._echo is not None
        return bool(await self._echo(b"hello", timeout=TIMEOUT) == b"hello")

    async def _send(self, began: float) -> bool:
        sender, recipient = self._random.sample(PROFILES, 2)
        session = self._sessions.via(sender)
        return isinstance(await session.send(recipient, Text("hello"), outcome=True), Acked)

    # -- the other ends ------------------------------------------------------------------------

    async def index(self, txn: Transaction | Reset) -> None:
        """Consume a transaction of the change stream."""
        if not isinstance(txn, Reset):
            for change in txn:
                if change.new is not None:
                    self._served("changes", change.new["began"])

    async def _subscribe(self, tenant: str) -> None:
        last: str | None = None
        while True:
            try:
                async with self._live.subscribe(tenant, after=last) as events:
                    async for event in events:
                        if isinstance(event, LiveEvent):
                            last = event.id
                            self._served("events", json.loads(event.payload)["began"])
            except (BrokerOff, SlowSubscriber):
                pass
            await asyncio.sleep(PAUSE)

    async def _stay_signed_in(self, profile: str) -> None:
        """Sign in again after a takeover, because a session then stays offline by itself."""
        while True:
            await asyncio.sleep(PAUSE)
            session = self._sessions.whereis(profile)
            if session is not None and session.state.startswith("offline"):
                await asyncio.sleep(SIGN_IN_AFTER)
                await session.connect()

    def missing_sessions(self) -> int:
        """Return how many running sessions are not online; a stopped one is not running."""
        return sum(each.state != "online" for each in self._sessions)
