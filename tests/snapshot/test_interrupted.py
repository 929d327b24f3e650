"""Callers that stop early, or are cancelled."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.postgres.conftest import MakePostgres, Sql

from moored.postgres import Snapshot


def each_way(snapshot: Snapshot) -> list[AsyncIterator[Any]]:
    return [aiter(snapshot), snapshot.chunks(), snapshot.blocks()]


@pytest.mark.parametrize("consistent", [False, True])
async def test_leaving_a_snapshot_early_logs_no_error(
    make: MakePostgres, sql: Sql, caplog: pytest.LogCaptureFixture, consistent: bool
) -> None:
    async with make() as pg:
        for way in range(3):
            async with pg.snapshot("orders", chunk_rows=10, consistent=consistent) as snapshot:
                async for _ in each_way(snapshot)[way]:
                    break
    gc.collect()
    assert "Task exception was never retrieved" not in caplog.text
