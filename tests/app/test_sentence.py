"""The sentence on the state of an app: what has failed with a part, and what besides it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moored.app import App, ComponentContext
from moored.service import Config

#: Nothing listens there.
DEAD = "postgresql://app@127.0.0.1:1"


@pytest.mark.timeout(120)
async def test_only_parts_of_one_server_or_after_one_another_are_called_affected(
    tmp_path: Path,
) -> None:
    app = App("orders", config=Config())
    app.channel("127.0.0.1:2", name="vectors", required=False)
    app.pool(f"{DEAD}/orders", name="db")
    pg = app.postgres(f"{DEAD}/reports", state_dir=tmp_path)
    app.broker(pg.outbox, name="live", channels=["orders"])

    @app.component(after=["postgres"])
    async def importer(ctx: ComponentContext) -> None:
        await asyncio.Event().wait()

    async with app:
        assert app.service is not None
        view = app.service.view
        async with asyncio.timeout(60):
            while len(view.degraded()) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            # Both have tried: the server refuses connections.
            while "refused" not in view.sentence():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        starting = "Starting: 0 of 5 parts work: PostgreSQL: not reached yet: connection failed"
        assert view.sentence().startswith(starting)
        waits = " Waiting for it: db, postgres, live, importer. Also: gRPC server: not reached yet."
        assert view.sentence().endswith(waits), view.sentence()


async def test_a_health_without_a_reason_shows_no_empty_one() -> None:
    app = App("orders", config=Config())

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        ctx.health("active")
        ctx.health("degraded")
        await asyncio.Event().wait()

    async with app, asyncio.timeout(60):
        await app.ready()
        assert app.service is not None
        view = app.service.view
        while not view.degraded():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert view.sentence() == "importer works only in part."
        assert "because" not in app.explain("importer")
        reasons = [words for each in app.recorder.events() for words in each.because]
        assert [words for words in reasons if not words.removesuffix(": ").strip()] == []
        assert [words for words in reasons if words.endswith(": ")] == []
