"""A lease client as a part of an app: shared by other parts, shown, and in the metrics."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from moored.app import App
from moored.kernel import StartFailed
from moored.service import Config, ServiceError


async def test_leases_are_shown_and_released_with_the_app() -> None:
    app = App("orders", config=Config())
    leases = app.leases("memory://")
    async with app:
        await app.ready(60)
        async with leases.exclusive("nightly-report"):
            assert app.service is not None
            status = app.service.view.as_dict()
            assert status["parts"] == {"leases": "active"}
            assert status["leases"]["held"] == 1
            metrics = generate_latest(app.service.registry).decode()
        assert "works" in app.explain("leases")
    assert 'moored_leases_held{leases="leases"} 1.0' in metrics
    assert 'moored_leases_available{leases="leases"} 1.0' in metrics
    assert 'moored_leases_lost_total{leases="leases",reason="expired"} 0.0' in metrics


async def test_an_app_is_degraded_while_the_store_does_not_answer() -> None:
    app = App("orders", config=Config())
    leases = app.leases("redis://127.0.0.1:9")  # nothing listens there
    async with app:
        await app.ready(60)
        await app._running().monitor.wait_until(lambda status: status == "degraded", 60)
        assert "the store does not answer" in app.explain("leases")
        assert not leases.statistics().available


async def test_a_later_part_that_cannot_be_opened_fails_the_app_with_its_reason() -> None:
    app = App("orders", config=Config())
    app.leases("memory://", name="first")
    app.leases("redis://127.0.0.1:9", on_unavailable="refuse", after=["first"])
    async with app:
        with pytest.raises(ServiceError, match=r"leases cannot start: Redis at .* is unavailable"):
            await app.ready(60)
        assert "Redis at 127.0.0.1:9 is unavailable" in app.explain("leases")
        assert app.status == "failed"


async def test_an_app_does_not_start_without_a_store_that_must_answer() -> None:
    app = App("orders", config=Config())
    app.leases("redis://127.0.0.1:9", on_unavailable="refuse")
    with pytest.raises(StartFailed, match=r"Redis at 127\.0\.0\.1:9 is unavailable"):
        async with app:
            pass
