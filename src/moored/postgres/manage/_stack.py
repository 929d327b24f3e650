"""The objects of a stream that outlive its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Self

import psycopg

from moored.kernel import (
    Backoff,
    Clock,
    Condition,
    Machine,
    Recorder,
    StatusMonitor,
    WaitTimeout,
    describe,
    outliving,
)

from .._errors import PostgresError
from .._settings import Settings
from ..consume import Hub, Integrity, StateStore, StoredState, stored
from ..decode import Types
from ..report import CHART, CONDITIONS, WORDS, Outages, StackEvents, Status, status_of
from ..server import Resolver, _admin, connect
from ..stream import Published, ReceivedTotals
from ._manager_core import ManagerCore

__all__ = ["Stack"]

#: The first and the longest wait before the next attempt, jitter included, in seconds.
BACKOFF = (1.0, 10.0)


class Stack:
    """What each `Manager` of a stream works with, and what its report is made from."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        recorder: Recorder,
        store: StateStore,
        state: StoredState,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.recorder = recorder
        self.store = store
        self.hub = Hub(store, recorder, clock=clock, state=state)
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
        self.published = Published()
        self.types = Types()

    @classmethod
    async def open(cls, settings: Settings, clock: Clock, recorder: Recorder) -> Self:
        """Open the state file, and create the objects of its stream."""

        def opened() -> tuple[StateStore, StoredState]:
            store = StateStore(settings.state_dir / f"{settings.stream_id}.db")
            try:
                return store, store.load()
            except BaseException:
                store.close()
                raise

        opening = asyncio.ensure_future(stored(opened))
        try:
            return cls(settings, clock, recorder, *await outliving(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_closed)
            raise

    def _status_of(self, conditions: Mapping[str, Condition]) -> Status:
        return self.frozen_status or status_of(conditions, asleep=self.asleep, loaded=True)

    async def connect(self, timeout: float) -> psycopg.AsyncConnection[Any]:
        """Open a connection to the server itself, beside the pools, for a few queries."""
        async with asyncio.timeout(timeout):
            conninfo = await self.resolver.conninfo(self.settings.replication_url)
            return await connect(conninfo, application_name=self.settings.application_name)

    async def wait_until(self, predicate: Callable[[Status], bool], timeout: float | None) -> None:
        """Wait until the status meets a predicate; a `WaitTimeout` names step and last failure."""
        try:
            await self.monitor.wait_until(predicate, timeout)
        except WaitTimeout as error:
            text = f"{error}; the current step: {WORDS[self.machine.step]}"
            if self.outages.now is not None:
                text += f"; the last failure: {self.outages.now.last}"
            raise WaitTimeout(text) from None

    async def drop_slot_and_publication(self) -> None:
        """Drop them if the manager could not: without the lock, or before its pools were open."""
        slot = self.settings.slot_name
        try:
            async with (
                asyncio.timeout(_admin.TIMEOUT),
                await self.connect(_admin.TIMEOUT) as conn,
            ):
                # The slot first: this fails while another instance reads it, which needs both.
                await _admin.drop_slot(conn, slot)
                if not self.settings.manual_publication:
                    await _admin.drop_publication(conn, self.settings.publication_name)
        except (psycopg.Error, OSError, PostgresError) as error:
            raise PostgresError(
                f"the slot {slot} could not be dropped: {describe(error)}"
            ) from error


def _closed(opening: asyncio.Future[tuple[StateStore, StoredState]]) -> None:
    """Close the file that a cancelled caller has opened."""
    if opening.exception() is None:
        opening.result()[0].close()
