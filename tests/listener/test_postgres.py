"""The listener of a `Postgres`: started with its URL, by the first subscription, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.postgres.conftest import stream_id, streamed_url
from tests.servers import require_server

from moored.kernel.prometheus import LinksCollector
from moored.postgres import ConfigurationError, Gap, Health, Postgres
from moored.postgres.listen.prometheus import ListenerCollector

from .breaks import LIMIT, listener_pids, next_event, until

__all__ = ["stream_id", "streamed_url"]


@pytest.fixture
def bouncer(streamed_url: str) -> Iterator[str]:
    with pgbouncer(require_server("pgbouncer"), streamed_url, pool_size=2) as url:
        yield url


@pytest.fixture
def options(streamed_url: str, stream_id: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "replication_url": streamed_url,
        "stream_id": stream_id,
        "state_dir": tmp_path,
        "pool_size": 2,
    }


async def test_notifications_and_queries_use_two_paths(
    streamed_url: str, bouncer: str, options: dict[str, Any]
) -> None:
    async with Postgres(bouncer, notify_url=streamed_url, **options) as pg:
        assert pg.listener is not None
        await pg.wait_until_active(LIMIT)
        async with pg.listener.subscribe("orders") as events:
            if not pg.listener.up:
                assert isinstance(await next_event(events), Gap)
            await pg.listener.notify("orders", "1")
            assert (await next_event(events))[:2] == ("orders", "1")
        assert "connection" in str(pg.tree())
        assert "listener" in str(pg.tree())
        assert pg.statistics()["listener"]["up"]


async def test_options_that_a_pooler_refuses_are_left_out(
    streamed_url: str,
    bouncer: str,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c geqo=off")
    for url in (bouncer, f"{bouncer}?options=-c%20geqo%3Doff"):
        async with Postgres(url, notify_url=streamed_url, **options) as pg:
            await pg.wait_until_active(LIMIT)
            async with pg.connection() as conn:
                assert await (await conn.execute("show geqo")).fetchone() == ("on",)
    assert caplog.text.count("without `options` (set them by ALTER ROLE … SET)") == 2


async def test_a_lost_listener_is_degraded_with_200(
    streamed_url: str, options: dict[str, Any]
) -> None:
    async with Postgres(streamed_url, notify_url=streamed_url, **options) as pg:
        assert pg.listener is not None
        await pg.wait_until_active(LIMIT)
        await pg.listener.wait_until_up(LIMIT)
        assert pg.health is Health.ACTIVE
        seen: list[tuple[Health, int]] = []
        pg.listener.monitor.subscribe(lambda change: seen.append((pg.health, pg.health.http)))
        [pid] = await listener_pids(streamed_url)
        os.kill(pid, signal.SIGTERM)

        async def was_degraded() -> bool:
            return (Health.DEGRADED, 200) in seen

        await until(was_degraded)
        async with pg.connection() as conn:
            await conn.execute("select 1")
        await pg.listener.wait_until_up(LIMIT)


async def test_a_pooler_as_notify_url_is_fatal(bouncer: str, options: dict[str, Any]) -> None:
    async with Postgres(bouncer, notify_url=bouncer, **options) as pg:
        assert pg.listener is not None
        with pytest.raises(ConfigurationError, match="transaction mode"):
            await pg.listener.settled()
        assert pg.health is Health.FAILED
        assert pg.fatal is not None
        assert "NOTIFY_URL" in pg.fatal


async def test_without_a_url_the_first_subscription_starts_the_listener(
    streamed_url: str, options: dict[str, Any]
) -> None:
    async with Postgres(streamed_url, **options) as pg:
        await pg.wait_until_active(LIMIT)
        assert pg.listener is not None
        assert not pg.listener.is_open
        async with pg.listener.subscribe("a") as events:
            assert pg.listener.up
            await pg.listener.notify("a", "x")
            assert (await next_event(events))[:2] == ("a", "x")
        assert pg.health is Health.ACTIVE


async def test_no_canary_wakes_a_postgres_that_sleeps(
    streamed_url: str, options: dict[str, Any]
) -> None:
    async with Postgres(streamed_url, notify_url=streamed_url, **options) as pg:
        listener = pg.listener
        assert listener is not None
        await pg.wait_until_active(LIMIT)
        await listener.monitor.wait_until(
            lambda _: listener.monitor.conditions()["canary"].met, LIMIT
        )
        assert not listener.stands_by()
        await pg.sleep()
        assert listener.stands_by()


async def test_first_subscriptions_at_once_share_one_start_which_outlives_a_cancelled_one(
    streamed_url: str, options: dict[str, Any]
) -> None:
    async with Postgres(streamed_url, **options) as pg, AsyncExitStack() as stack:
        await pg.wait_until_active(LIMIT)
        assert pg.listener is not None
        first, *others = [
            asyncio.ensure_future(stack.enter_async_context(pg.listener.subscribe("a")))
            for _ in range(3)
        ]
        await asyncio.sleep(0)  # each waits for the start
        first.cancel()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*others)
        assert first.cancelled()
        assert pg.listener.up


async def test_without_a_url_and_behind_a_pooler_the_listener_is_off(
    bouncer: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with Postgres(bouncer, **options) as pg:
        await pg.wait_until_active(LIMIT)
        assert pg.listener is not None
        with pytest.raises(ConfigurationError, match="set notify_url"):
            async with pg.listener.subscribe("a"):
                pass
        assert pg.health is Health.ACTIVE
    assert "set notify_url" in caplog.text


async def test_an_empty_url_turns_the_listener_off(
    streamed_url: str, options: dict[str, Any]
) -> None:
    async with Postgres(streamed_url, notify_url="", **options) as pg:
        await pg.wait_until_active(LIMIT)
        assert pg.listener is None
        assert pg.health is Health.ACTIVE


async def test_the_metrics_show_state_generation_and_latencies(
    streamed_url: str, options: dict[str, Any]
) -> None:
    async with Postgres(streamed_url, notify_url=streamed_url, **options) as pg:
        assert pg.listener is not None
        await pg.wait_until_active(LIMIT)
        await pg.listener.wait_until_up(LIMIT)
        registry = CollectorRegistry()
        registry.register(ListenerCollector(pg.listener))
        registry.register(LinksCollector(pg.listener))
        labels = {"listener": pg.listener.name}

        def value(name: str, **more: str) -> float | None:
            return registry.get_sample_value(f"moored_postgres_listener_{name}", labels | more)

        async def measured() -> bool:
            return value("canary_seconds") is not None and value("queue_usage") is not None

        await until(measured)
        assert value("up") == 1.0
        link = {"system": "listener", "name": pg.listener.name}
        assert registry.get_sample_value("moored_links", {**link, "state": "up"}) == 1.0
        assert registry.get_sample_value("moored_links", {**link, "state": "down/waiting"}) == 0.0
        assert value("generation") == 1.0
        assert value("reconnects_total") == 0.0
        assert value("heartbeat_age_seconds") is not None
