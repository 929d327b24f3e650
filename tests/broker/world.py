"""A simulated world for the broker: a log of events, a source that follows it, and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from moored.broker import (
    Broker,
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
    """All events in order, as an outbox table keeps them; a source and a history."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self.all: list[SourceEvent] = []
        # The events up to this one are not in the history.
        self.deleted = 0
        self._grown = asyncio.Event()
        self._yielded = 0
        self._gap = True

    def append(self, tenant: str, channel: str) -> None:
        number = len(self.all) + 1
        payload = json.dumps({"org_id": tenant, "number": number})
        self.all.append(SourceEvent(channel, payload, tenant, f"at-{number}", number))
        self._grown.set()

    def lose(self) -> None:
        """Let the source miss the events that it has not yielded yet."""
        self._yielded = self.deleted = len(self.all)
        self._gap = True
        self._grown.set()

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        while True:
            if self._gap:
                self._gap = False
                yield SourceGap("the source was away")
            while self._yielded < len(self.all) and not self._gap:
                self._yielded += 1
                yield self.all[self._yielded - 1]
                if self._sim.rng.random() < 0.3:
                    await asyncio.sleep(self._sim.random(0, 0.02))
                if self._sim.rng.random() < 0.01:
                    raise ConnectionError("the source has lost its connection")
            self._grown.clear()
            if not self._gap:
                await self._grown.wait()

    def position(self, id: str) -> Any:
        word, _, number = id.partition("-")
        if word != "at":
            raise HistoryLost("not an event id")
        return int(number)

    async def read(
        self, after: Any, tenant: str, channels: frozenset[str], limit: int
    ) -> list[SourceEvent]:
        await asyncio.sleep(self._sim.random(0, 0.05))
        if after < self.deleted:
            raise HistoryLost("the events were deleted")
        found = [event for event in self.of(tenant, channels) if event.position > after][:limit]
        await asyncio.sleep(self._sim.random(0, 0.05))
        return found

    def of(self, tenant: str, channels: frozenset[str]) -> list[SourceEvent]:
        return [event for event in self.all if event.tenant == tenant and event.channel in channels]


class Client:
    """A client that reads at its own pace, leaves, and comes back with its last event's id."""

    def __init__(self, sim: Sim, broker: Broker, log: Log) -> None:
        self._sim = sim
        self._broker = broker
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
            except (TimeoutError, SlowSubscriber):
                await asyncio.sleep(self._sim.random(0, 0.5))

    async def _read(self) -> None:
        async with self._broker.subscribe(self.tenant, self.channels, after=self._last) as events:
            if not self._last:
                self._complete = None
            async for item in events:
                buffered = len(events.subscriber)
                assert buffered <= 4, f"{buffered} events are buffered"
                if isinstance(item, LiveEvent):
                    self._got(item)
                else:
                    self._complete = None
                if isinstance(item, StreamReset):
                    self._last = item.id
                    self._complete = self._log.position(item.id) if item.id else None
                if self._done:
                    return
                if self._pace:
                    await asyncio.sleep(self._sim.random(0, self._pace))

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
    policies: list[SlowPolicy] = ["disconnect", "disconnect", "drop", "latest"]
    policy = sim.rng.choice(policies)
    broker = Broker(log, replay=log, channels=[*CHANNELS, END], buffer=4, slow=policy)

    async def write() -> None:
        for _ in range(40):
            await asyncio.sleep(sim.random(0, 0.1))
            for _ in range(sim.rng.choice([1, 1, 20])):
                log.append(sim.rng.choice(TENANTS), sim.rng.choice(CHANNELS))
            if sim.rng.random() < 0.02:
                log.lose()
            elif sim.rng.random() < 0.02:
                log.deleted = max(log.deleted, len(log.all) - 10)

    async with broker:
        clients = [Client(sim, broker, log) for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run())
            await write()
            # Events at the end, until every client has seen one: a client may be resuming.
            while any(not client._done for client in clients):
                for tenant in TENANTS:
                    log.append(tenant, END)
                await asyncio.sleep(1)
        assert len(broker._audience) == 0
        assert not broker._audience._index, "the index keeps subscribers that have left"
