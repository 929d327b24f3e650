"""nginx with a plain `proxy_pass`, which hides that its clients are on other machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.http_client import http_client
from tests.service.support import Running, running
from tests.stories.proxies import nginx

APP = """
import asyncio
import moored

app = moored.App("orders")


@app.component
async def importer(ctx):
    await asyncio.Event().wait()
"""
BUTTON = "/v1/break/kill-backends"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "orders.py").write_text(APP)
    with running("orders:app", "--log-level", "debug", cwd=tmp_path) as started:
        started.wait_active()
        yield started


def browser(url: str) -> httpx.AsyncClient:
    return http_client(url, headers={"Accept": "text/html"})


async def test_behind_a_plain_proxy_nothing_but_health_is_open(
    service: Running, tmp_path: Path
) -> None:
    place = urlsplit(service.link)
    async with (
        nginx(tmp_path / "nginx", place.port or 0, target=place.netloc) as front,
        browser(front.url) as asking,
    ):
        assert (await asking.get("/v1/health?ready")).status_code == 200
        page = await asking.get("/")
        assert page.status_code == 401
        assert "the link that <code>moored serve</code> printed" in page.text
        for path in ("/v1/status", "/metrics", "/openapi.json"):
            refused = await asking.get(path)
            assert refused.status_code == 401, path
            assert "the link that `moored serve` printed" in refused.json()["detail"]
        assert (await asking.post(BUTTON)).status_code == 401
        assert (await asking.get("/?token=guess")).status_code == 401

        right = await asking.get(f"/?{place.query}")
        assert (right.status_code, right.headers["location"]) == (303, "./")
        assert (await asking.get("/")).status_code == 200
        # nginx has replaced the Host header, so that this could be a page on any port.
        pressed = await asking.post(BUTTON, headers={"Origin": front.url})
        assert pressed.status_code == 403
        assert "proxy_set_header Host $http_host" in pressed.json()["detail"]
    assert service.stop() == 0
    token = place.query.partition("=")[2]
    assert len(token) >= 32
    assert [line for line in service.lines if token in line] == service.lines[:1]
    assert any("GET /?token=***" in line for line in service.lines), service.lines
    assert not any("guess" in line for line in service.lines)


async def test_behind_a_proxy_that_passes_the_host_on_the_buttons_work(
    service: Running, tmp_path: Path
) -> None:
    place = urlsplit(service.link)
    settings = "proxy_set_header Host $http_host;"
    async with (
        nginx(tmp_path / "nginx", place.port or 0, target=place.netloc, settings=settings) as front,
        browser(front.url) as asking,
    ):
        assert (await asking.get(f"/?{place.query}")).status_code == 303
        pressed = await asking.post(BUTTON, headers={"Origin": front.url})
        assert pressed.status_code == 404  # this app has no such button
        foreign = {"Origin": "http://127.0.0.1:1"}
        assert (await asking.post(BUTTON, headers=foreign)).status_code == 403
