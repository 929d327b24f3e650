"""The live page, in a real browser, over a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Page
from tests.service.support import Running, running

from moored.embedded import SyncEmbeddedPostgres

STATUS = "document.querySelector('#status')?.textContent"


@pytest.fixture(scope="module")
def service(postgres: SyncEmbeddedPostgres) -> Iterator[Running]:
    with running("--database-url", postgres.url) as started:
        started.wait_active()
        yield started


def test_the_page_shows_parts_tree_machines_and_events(service: Running, page: Page) -> None:
    page.open(service.url)
    page.until(f"{STATUS} === 'active'")
    assert f"pid {service.process.pid}" in page.text("#about")
    assert page.text("#sentence").startswith("Everything works: 2 parts, for ")
    postgres = "[data-part=postgres]"
    assert "active" in page.text(postgres)
    paths = "[...document.querySelectorAll('#tree [data-path]')].map(node => node.dataset.path)"
    assert page.evaluate(paths) == [
        "moored",
        "moored/postgres",
        "moored/postgres/manager",
        "moored/postgres/manager/connection",
        "moored/postgres/manager/connection/restarter",
        "moored/postgres/manager/connection/manager",
        "moored/postgres/manager/connection/manager/connections",
        "moored/postgres/manager/connection/manager/connections/replication",
        "moored/postgres/manager/connection/manager/connections/admin",
        "moored/postgres/manager/connection/manager/connections/snapshot",
        "moored/postgres/manager/connection/manager/connections/watch",
        "moored/postgres/manager/connection/manager/connections/publish",
        "moored/postgres/manager/connection/manager/manager",
        "moored/http",
    ]
    assert "streaming" in page.text(f"{postgres} .machine")
    lit = f"document.querySelector('{postgres} .step.lit').title"
    page.until(f"{lit} === 'streaming'")
    assert "snapshot pool" in page.text(postgres)
    assert "1 of 1, 0 in use, 0 waiting" in page.text(postgres)
    assert "postgres/connection" in page.text("#events")
    assert page.complaints == []


def test_the_page_updates_when_postgres_is_killed_and_restarts(tmp_path: Path, page: Page) -> None:
    with running("--data-dir", str(tmp_path / "data")) as service:
        service.wait_active()
        page.open(service.url)
        page.until(f"{STATUS} === 'active'")
        # Every status is recorded as it is shown, so that a short one is not missed.
        page.evaluate(
            "window.seen = []; new MutationObserver(() => seen.push("
            f"{STATUS})).observe(document.querySelector('#status'), {{childList: true}})"
        )
        service.postgres().kill()
        page.until("seen.length > 1 && seen.at(-1) === 'active'")
        assert set(page.evaluate("seen")) <= {"degraded", "waiting", "starting", "active"}
        server = "[...document.querySelectorAll('[data-path=\"moored/postgres/server\"]')][0]"
        assert "restarted once" in page.evaluate(f"{server}.innerText")
        assert "SIGKILL" in page.evaluate(f"{server}.innerText")
        assert "by SIGKILL" in page.text("#events")
        # Steps are shown as descriptions, not by their names in the code.
        for section in ("#sentence", "#parts", "#outages", "#events"):
            text = page.text(section)
            assert "start_" not in text, section
            assert "['" not in text, section
        assert page.complaints == []


def test_the_page_shows_a_lost_service_and_reconnects(postgres_url: str, page: Page) -> None:
    with running("--database-url", postgres_url) as first:
        first.wait_active()
        url = first.url
        page.open(url)
        page.until(f"{STATUS} === 'active'")
        assert first.stop() == 0
    page.until(f"{STATUS} === 'disconnected'")
    assert "has not responded since" in page.text("#lost")
    with running("--database-url", postgres_url, "--port", url.rpartition(":")[2]) as second:
        page.until(f"document.querySelector('#about').innerText.includes('{second.process.pid}')")
        page.until(f"{STATUS} === 'active'")
        assert not page.evaluate("document.querySelector('#lost').checkVisibility()")


def test_the_page_requires_the_token_and_keeps_the_session(postgres_url: str, page: Page) -> None:
    environ = {"MOORED_ADMIN_TOKEN": "t0ken", "DATABASE_URL": postgres_url}
    with running(environ=environ) as service:
        service.wait_active()
        page.open(service.url)
        page.until("document.querySelector('#token')")
        assert (
            page.evaluate("getComputedStyle(document.querySelector('button')).cursor") == "pointer"
        )

        _log_in(page, "guess")
        page.until("document.body.innerText.includes('That is not the token')")
        _log_in(page, "t0ken")
        page.until(f"{STATUS} === 'active'")
        assert page.evaluate("document.cookie") == ""  # not for scripts
        page.open(service.url)
        page.until(f"{STATUS} === 'active'")

        page.evaluate("document.querySelector('form[action=\"logout\"] button').click()")
        page.until("document.querySelector('#token')")


def test_names_and_causes_are_text_and_never_markup(service: Running, page: Page) -> None:
    page.open(service.url)
    page.until(f"{STATUS} === 'active'")
    evil = "<img src=x onerror=window.hacked=1>"
    event = {"id": 10**9, "wall": 0, "component": evil, "kind": "failure", "text": evil}
    page.evaluate(f"addEvent({json.dumps({**event, 'because': [evil]})})")
    assert evil in page.text("#events tr")
    assert page.evaluate("document.querySelectorAll('#events img').length") == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_light_and_dark(service: Running, page: Page, scheme: str) -> None:
    page.prefer(scheme)
    page.open(service.url)
    page.until(f"{STATUS} === 'active'")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert [pair for pair in contrasts if pair["ratio"] < 4.5] == []


def test_a_narrow_window_does_not_scroll_sideways(service: Running, page: Page) -> None:
    page.command(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=800,
        deviceScaleFactor=1,
        mobile=True,
    )
    page.open(service.url)
    page.until(f"{STATUS} === 'active'")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def _log_in(page: Page, token: str) -> None:
    page.evaluate(
        f"document.querySelector('#token').value = {json.dumps(token)};"
        "document.querySelector('form').requestSubmit()"
    )


#: The contrast of every text with what is behind it, by the formula of WCAG.
CONTRASTS = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(rgba(getComputedStyle(at).backgroundColor));
      if (layers.at(-1)[3] === 255) break;
    }
    return layers.reverse().reduce((below, [r, g, b, a]) =>
      [r, g, b].map((part, n) => (part * a + below[n] * (255 - a)) / 255), [255, 255, 255]);
  };
  const light = (colour) => colour.slice(0, 3)
    .map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
  return [...document.querySelectorAll("body *")]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
    .filter((e) => e.checkVisibility())
    .map((e) => {
      const [one, other] = [light(rgba(getComputedStyle(e).color)), light(behind(e))];
      const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
      return { text: e.textContent.trim().slice(0, 40), className: e.className, ratio };
    });
})()
"""
