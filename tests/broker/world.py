"""A simulated world for the broker: a log of events, nodes that follow it, and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from moored.broker import (
    Broker,
    BrokerOff,
    HistoryLost,
    LiveEvent,
    SlowPolicy,
    SlowSubscriber,
    SourceEvent,
    SourceGap,
    StreamReset,
)
from moored.testing import Sim

TENANTS = [f"0000000{number}-0000-0000-0000-000000000000" for number in range(3)]
CHANNELS = ("orders", "refunds")
#: The channel of the last event, after which a client ends.
END = "end"


class Log:
    """All events in order, as an outbox table keeps them."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self.all: list[SourceEvent] = []
        # The events up to this one are not in the history.
        self.deleted = 0
        # How often events were lost.
        self.losses = 0
        self.grown = asyncio.Event()

    def append(self, tenant: str, channel: str) -> None:
        number = len(self.all) + 1
        payload = json.dumps({"org_id": tenant, "number": number})
        self.all.append(SourceEvent(channel, payload, tenant, f"at-{number}", number))
        self.grown.set()

    def lose(self) -> None:
        """Let the sources miss the events that they have not yielded yet."""
        self.deleted = len(self.all)
        self.losses += 1
        self.grown.set()

    def position(self, id: str) -> Any:
        word, _, number = id.partition("-")
        if word != "at":
            raise HistoryLost("not an event id")
        return int(number)

    async def read(
        self, after: Any, tenant: str, channels: frozenset[str] | None, limit: int
    ) -> list[SourceEvent]:
        await asyncio.sleep(self._sim.random(0, 0.05))
        if self._sim.rng.random() < 0.02:
            raise ConnectionError("the history has lost its connection")
        if after < self.deleted:
            raise HistoryLost("the events were deleted")
        found = [event for event in self.of(tenant, channels) if event.position > after][:limit]
        await asyncio.sleep(self._sim.random(0, 0.05))
        return found

    def of(self, tenant: str, channels: frozenset[str] | None) -> list[SourceEvent]:
        found = [event for event in self.all if event.tenant == tenant]
        return [event for event in found if channels is None or event.channel in channels]


class Source:
    """Follows the log from its end on, for one broker."""

    def __init__(self, sim: Sim, log: Log) -> None:
        self._sim = sim
        self._log = log
        self._yielded = 0
        self._losses = -1

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        log = self._log
        while True:
            if self._losses != log.losses:
                self._losses, self._yielded = log.losses, len(log.all)
                yield SourceGap("the source was away", f"at-{self._yielded}")
            while self._yielded < len(log.all) and self._losses == log.losses:
                self._yielded += 1
                yield log.all[self._yielded - 1]
                if self._sim.rng.random() < 0.3:
                    await asyncio.sleep(self._sim.random(0, 0.02))
                if self._sim.rng.random() < 0.01:
                    raise ConnectionError("the source has lost its connection")
            log.grown.clear()
            if self._losses == log.losses:
                await log.grown.wait()


class Node:
    """A broker that is drained and replaced now and then."""

    def __init__(self, sim: Sim, log: Log) -> None:
        self._sim = sim
        self._log = log
        policies: list[SlowPolicy] = ["disconnect", "disconnect", "drop", "latest"]
        self._policy = sim.rng.choice(policies)
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self.broker = Broker(
            Source(self._sim, self._log),
            replay=self._log,
            channels=[*CHANNELS, END],
            buffer=4,
            slow=self._policy,
        )
        await self._stack.enter_async_context(self.broker)
        idling = asyncio.create_task(self._send_keepalives())
        self._stack.callback(idling.cancel)

    async def _send_keepalives(self) -> None:
        while True:
            await asyncio.sleep(self._sim.random(0, 0.2))
            for subscriber in list(self.broker._audience):
                if self._sim.rng.random() < 0.5:
                    subscriber.keepalive(*self.broker._newest)

    async def stop(self) -> None:
        await self.broker.drain(over=self._sim.random(0, 1))
        await self._stack.aclose()

    async def restart_at_times(self) -> None:
        for _ in range(self._sim.rng.choice([0, 1, 2])):
            await asyncio.sleep(self._sim.random(0, 2))
            await self.stop()
            await asyncio.sleep(self._sim.random(0, 0.3))
            await self.start()


class Client:
    """A client that reads at its own pace, leaves, and comes back with its last event's id."""

    def __init__(self, sim: Sim, node: Node, log: Log) -> None:
        self._sim = sim
        self._node = node
        self._log = log
        self.tenant = sim.rng.choice(TENANTS)
        kept = [name for name in CHANNELS if sim.rng.random() < 0.7]
        self.channels = frozenset([*kept, END])
        self._pace = sim.rng.choice([0.0, 0.0, 0.02, 0.2])
        self._last = ""
        # The position after which no event may be missing; None after a reset.
        self._complete: int | None = None
        self._done = False

    async def run(self) -> None:
        while not self._done:
            try:
                async with asyncio.timeout(self._sim.random(0.05, 3)):
                    await self._read()
            except (BrokerOff, TimeoutError, SlowSubscriber):
                pass
            await asyncio.sleep(self._sim.random(0, 0.5))

    async def _read(self) -> None:
        broker = self._node.broker
        async with broker.subscribe(self.tenant, self.channels, after=self._last) as events:
            if not self._last:
                self._moved(events.start)
            try:
                async for item in events:
                    buffered = len(events.subscriber)
                    assert buffered <= 4, f"{buffered} events are buffered"
                    if isinstance(item, LiveEvent):
                        self._got(item)
                    else:
                        self._complete = None
                    if isinstance(item, StreamReset):
                        self._moved(item.id)
                    if self._done:
                        return
                    if self._pace:
                        await asyncio.sleep(self._sim.random(0, self._pace))
            finally:
                self._idled(events.id)

    def _idled(self, id: str) -> None:
        """Resume after this id: no event may be missing up to it."""
        if id and self._complete is not None:
            until = self._log.position(id)
            own = [each.position for each in self._log.of(self.tenant, self.channels)]
            missed = [each for each in own if self._complete < each <= until]
            assert not missed, f"missed {missed} until {until}"
            assert until >= self._complete, f"went back to {until}"
            self._complete = until
        self._last = id or self._last

    def _moved(self, id: str) -> None:
        """From this id on, no event may be missing."""
        self._last = id
        self._complete = self._log.position(id) if id else None

    def _got(self, event: LiveEvent) -> None:
        assert event.tenant == self.tenant, "an event of another tenant"
        assert event.channel in self.channels, "an event of another channel"
        if self._last:
            last = self._log.position(self._last)
            assert event.position > last, f"{event.position} after {last}"
        if self._complete is not None:
            own = [each.position for each in self._log.of(self.tenant, self.channels)]
            missed = [each for each in own if self._complete < each < event.position]
            assert not missed, f"missed {missed} before {event.position}"
        self._last, self._complete = event.id, event.position
        self._done = event.channel == END


async def subscribers_come_and_go(sim: Sim) -> None:
    """Clients get all events of their tenant, once and in order, or a reset."""
    log = Log(sim)
    node = Node(sim, log)

    async def write() -> None:
        for _ in range(40):
            await asyncio.sleep(sim.random(0, 0.1))
            for _ in range(sim.rng.choice([1, 1, 20])):
                log.append(sim.rng.choice(TENANTS), sim.rng.choice(CHANNELS))
            if sim.rng.random() < 0.02:
                log.lose()
            elif sim.rng.random() < 0.02:
                log.deleted = max(log.deleted, len(log.all) - 10)

    await node.start()
    clients = [Client(sim, node, log) for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
        group.create_task(node.restart_at_times())
        await write()
        # Events at the end, until every client has seen one: a client may be resuming.
        while any(not client._done for client in clients):
            for tenant in TENANTS:
                log.append(tenant, END)
            await asyncio.sleep(1)
    assert len(node.broker._audience) == 0
    assert not node.broker._audience._index, "the index keeps subscribers that have left"
    await node.stop()
