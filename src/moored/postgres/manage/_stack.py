"""The objects of a stream that outlive its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import psycopg

from moored.kernel import Backoff, Clock, Condition, Machine, Recorder, StatusMonitor

from .._settings import Settings
from ..consume import Hub, Integrity, StateStore
from ..decode import Types
from ..report import CHART, CONDITIONS, Outages, StackEvents, Status, status_of
from ..server import Resolver, connect
from ..stream import ReceivedTotals
from ._manager_core import ManagerCore

__all__ = ["Stack"]

#: The first and the longest wait before the next attempt, jitter included, in seconds.
BACKOFF = (1.0, 10.0)


class Stack:
    """What each `Manager` of a stream works with, and what its report is made from."""

    def __init__(self, settings: Settings, clock: Clock, recorder: Recorder) -> None:
        self.settings = settings
        self.clock = clock
        self.recorder = recorder
        # Not in a thread: changes() must work as soon as another task can run.
        self.store = StateStore(settings.state_dir / f"{settings.stream_id}.db")
        self.hub = Hub(self.store, recorder, clock=clock)
        self.events = StackEvents(recorder, clock)
        self.integrity = Integrity(self.store, self.hub, self.events.emit)
        self.machine = Machine("postgres", CHART, clock=clock, recorder=recorder)
        #: Whether the connections were closed to sleep.
        self.asleep = False
        #: What is reported while they are being closed for that; None at other times.
        self.frozen_status: Status | None = None
        self.monitor: StatusMonitor[Status] = StatusMonitor(
            CONDITIONS, self._status_of, name="postgres.status", clock=clock, recorder=recorder
        )
        first, longest = BACKOFF
        # Half jitter adds up to 50 %.
        backoff = Backoff(first, longest / 1.5, jitter="half", clock=clock)
        self.core = ManagerCore(self.machine, backoff)
        self.outages = Outages(clock)
        self.resolver = Resolver(timeout=settings.connect_timeout)
        self.totals = ReceivedTotals()
        self.types = Types()

    def _status_of(self, conditions: Mapping[str, Condition]) -> Status:
        return self.frozen_status or status_of(conditions, asleep=self.asleep, loaded=True)

    async def connect(self, timeout: float) -> psycopg.AsyncConnection[Any]:
        """Open a connection to the server itself, beside the pools, for a few queries."""
        async with asyncio.timeout(timeout):
            conninfo = await self.resolver.conninfo(self.settings.replication_url)
            return await connect(conninfo, application_name=self.settings.application_name)
