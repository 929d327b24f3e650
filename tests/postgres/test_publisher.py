"""The publisher, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moored.kernel import Recorder
from moored.postgres import Changes, History
from moored.postgres._settings import Settings
from moored.postgres.consume import Hub, Publisher, StateStore
from moored.postgres.server import _admin

pytestmark = pytest.mark.every_loop


async def test_publishing_does_not_keep_an_unreferenced_consumer_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, may_answer = asyncio.Event(), asyncio.Event()

    async def rows(*args: Any, **values: Any) -> list[Any]:
        looking.set()
        await may_answer.wait()
        return []

    monkeypatch.setattr(_admin, "rows", rows)
    store = StateStore(tmp_path / "state.db")
    hub = Hub(store, Recorder())
    hub.begin(History("1", 1), 1000)
    changes = hub.attach("search", tables=("orders",))
    settings = Settings(database_url="", replication_url="", state_dir=tmp_path)
    conn = mock.Mock(execute=mock.AsyncMock(), info=mock.Mock(server_version=180000))
    look = asyncio.create_task(Publisher(hub, settings).publish(conn))
    await asyncio.wait_for(looking.wait(), 10)
    del changes
    again = hub.attach("search", tables=("orders",))
    may_answer.set()
    assert await asyncio.wait_for(look, 10) == []
    await again.aclose()
    store.close()


async def test_tables_of_consumers_that_attach_during_a_check_are_not_reported_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late: list[Changes] = []

    async def rows(*args: Any, **values: Any) -> list[Any]:
        if not late and "wanted" in values:
            late.append(hub.attach("late", tables=("others",)))
        return []

    monkeypatch.setattr(_admin, "rows", rows)
    store = StateStore(tmp_path / "state.db")
    hub = Hub(store, Recorder())
    hub.begin(History("1", 1), 1000)
    first = hub.attach("first", tables=("orders",))
    settings = Settings(database_url="", replication_url="", state_dir=tmp_path)
    conn = mock.Mock(execute=mock.AsyncMock(), info=mock.Mock(server_version=180000))
    await asyncio.wait_for(Publisher(hub, settings).publish(conn), 10)
    assert "no longer exist" not in caplog.text
    for each in (first, *late):
        await each.aclose()
    store.close()
