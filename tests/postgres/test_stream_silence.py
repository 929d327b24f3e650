"""When a stream reports that its server is silent, in virtual time."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.leases.virtual import in_virtual_time

from moored.kernel import Clock
from moored.postgres import StreamEnded
from moored.postgres._settings import Settings
from moored.postgres.decode import Types
from moored.postgres.stream._replication import ReceivedTotals, ReplicationClient
from moored.testing import Sim

KEEPALIVE = struct.pack("!cQqB", b"k", 1, 0, 0)


class Link:
    """A connection to a server that sends keepalives at some times, and then nothing any more."""

    has_input = False

    def __init__(self, times: list[float]) -> None:
        self.arrivals = 0
        self._times = times

    async def command(self, text: str, *, timeout: float | None = None) -> list[Any]:
        return []

    async def stream(self, command: str, *, timeout: float | None = None) -> None: ...

    async def send(self, message: bytes) -> None: ...

    async def receive(self) -> list[bytes]:
        if not self._times:
            await asyncio.Event().wait()
        await asyncio.sleep(self._times.pop(0) - Clock.current().monotonic())
        self.arrivals += 1
        return [KEEPALIVE]

    def cut(self) -> None: ...


@in_virtual_time
async def test_a_silence_is_reported_within_four_seconds_of_the_last_byte(sim: Sim) -> None:
    """However late in the interval of the checks it was received."""
    for last in (1.4, 1.6, 2.0, 2.4, 2.9, 3.1):
        begin = Clock.current().monotonic()
        link: Any = Link([begin + at for at in (0.5, 1.3, last)])

        async def conninfo() -> str:
            return ""

        client = ReplicationClient(
            conninfo=conninfo,
            settings=Settings(database_url="", replication_url="", state_dir=Path("/nowhere")),
            hub=mock.MagicMock(full=False, flushed=lambda: 0, checkpoint=mock.AsyncMock()),
            clock=Clock.current(),
            report=lambda step: None,
            first_message=lambda: None,
            totals=ReceivedTotals(),
            types=Types(),
            describe_types=mock.AsyncMock(),
            published=lambda transaction: None,
        )
        streaming = asyncio.create_task(client._stream(link))
        while not client.silent_for:
            assert Clock.current().monotonic() - begin < last + 4.0
            await asyncio.sleep(0.01)
        assert client.silent_for == pytest.approx(Clock.current().monotonic() - begin - last)
        with pytest.raises(ExceptionGroup) as ended:
            await streaming
        assert ended.group_contains(StreamEnded)
        assert Clock.current().monotonic() - begin < last + 10.0
