"""The live page, in a real browser, over a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Browser, Page
from tests.browser.many_sessions import SESSIONS
from tests.service.support import Running, running

from moored.embedded import SyncEmbeddedPostgres

ROOT = Path(__file__).parents[2]
STATUS = "document.querySelector('#status')?.textContent"
#: Milliseconds of script for one update, three times as long as it may take.
UPDATE_LIMIT = 300


@pytest.fixture(scope="module")
def service(postgres: SyncEmbeddedPostgres) -> Iterator[Running]:
    with running("--database-url", postgres.url) as started:
        started.wait_active()
        yield started


@pytest.fixture(scope="module")
def shown(service: Running, chromium: Browser) -> Iterator[Page]:
    """The page of the service, which must not complain."""
    with chromium.page() as page:
        page.open(service.link)
        page.until(f"{STATUS} === 'active'")
        yield page
        assert page.complaints == []


def test_the_page_shows_parts_tree_machines_and_events(service: Running, shown: Page) -> None:
    assert f"pid {service.process.pid}" in shown.text("#about")
    sentence = "document.querySelector('#sentence').innerText"
    shown.until(f"{sentence}.startsWith('Everything works: 2 parts, for ')")
    postgres = "[data-part=postgres]"
    assert "active" in shown.text(postgres)
    paths = "[...document.querySelectorAll('#tree [data-path]')].map(node => node.dataset.path)"
    assert shown.evaluate(paths) == [
        "moored",
        "moored/postgres",
        "moored/postgres/manager",
        "moored/postgres/manager/connection",
        "moored/postgres/manager/connection/restarter",
        "moored/postgres/manager/connection/manager",
        "moored/postgres/manager/connection/manager/connections",
        "moored/postgres/manager/connection/manager/connections/replication",
        "moored/postgres/manager/connection/manager/connections/snapshot",
        "moored/postgres/manager/connection/manager/connections/admin",
        "moored/postgres/manager/connection/manager/connections/watch",
        "moored/postgres/manager/connection/manager/connections/wake",
        "moored/postgres/manager/connection/manager/connections/publish",
        "moored/postgres/manager/connection/manager/manager",
        "moored/http",
    ]
    assert "streaming" in shown.text(f"{postgres} .machine")
    lit = f"document.querySelector('{postgres} .step.lit').title"
    shown.until(f"{lit} === 'streaming'")
    assert "snapshot pool" in shown.text(postgres)
    assert "1 of 1, 0 in use, 0 waiting" in shown.text(postgres)
    assert "postgres/connection" in shown.text("#events")


def test_a_link_on_a_page_of_another_site_opens_the_page(service: Running, page: Page) -> None:
    """Such as a terminal or a chat in the browser: on the way, a session is kept back."""
    for link in (service.link, service.url):
        page.open(f"data:text/html,<a href='{link}'>open</a>")
        page.until("document.querySelector('a')")
        page.evaluate("document.querySelector('a').click()")
        page.until(f"{STATUS} === 'active'")
        assert page.evaluate("location.search") == ""


def test_each_state_of_the_tree_links_to_its_reason(shown: Page) -> None:
    replication = "moored/postgres/manager/connection/manager/connections/replication"
    shown.evaluate(f"document.querySelector('[data-why=\"{replication}\"]').click()")
    shown.until("document.querySelector('#why-text').innerText !== ''")
    assert shown.text("#why-title") == replication
    assert "known: " not in shown.text("#why-text")
    shown.evaluate("document.querySelector('#why-close').click()")


def test_names_and_causes_are_text_and_never_markup(shown: Page) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    event = {"id": 10**9, "wall": 0, "component": evil, "kind": "failure", "text": evil}
    shown.evaluate(f"addEvent({json.dumps({**event, 'because': [evil]})})")
    assert evil in shown.text("#events tr")
    assert shown.evaluate("document.querySelectorAll('#events img').length") == 0
    assert shown.evaluate("window.hacked") is None


def test_a_narrow_window_does_not_scroll_sideways(shown: Page) -> None:
    shown.resize(360, 800)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_page_requires_the_token_shows_a_lost_service_and_reconnects(
    postgres_url: str, page: Page
) -> None:
    environ = {"MOORED_ADMIN_TOKEN": "t0ken", "DATABASE_URL": postgres_url}
    with running(environ=environ) as first:
        first.wait_active()
        url = first.url
        page.open(url)
        page.until("document.querySelector('#token')")
        _log_in(page, "guess")
        page.until("document.body.innerText.includes('That is not the token')")
        _log_in(page, "t0ken")
        page.until(f"{STATUS} === 'active'")
        assert page.evaluate("document.cookie") == ""  # not for scripts
        assert first.stop() == 0
    page.until(f"{STATUS} === 'disconnected'")
    assert "has not responded since" in page.text("#lost")
    with running("--port", url.rpartition(":")[2], environ=environ) as second:
        # The cookie is valid at the new process as well.
        page.until(f"document.querySelector('#about').innerText.includes('{second.process.pid}')")
        page.until(f"{STATUS} === 'active'")
        assert not page.evaluate("document.querySelector('#lost').checkVisibility()")
        page.evaluate("document.querySelector('form[action=\"logout\"] button').click()")
        page.until("document.querySelector('#token')")


def test_the_page_is_quick_with_many_sessions(page: Page) -> None:
    with running("tests.browser.many_sessions:app", cwd=ROOT) as service:
        service.wait_for("all sessions are online")
        # The first sign-in of all sessions is no incident.
        assert service.get("/v1/status").json()["outages"] == []
        page.open(service.link)
        card = "document.querySelector('[data-part=chat]').innerText"
        page.until(f"{card}.includes('{SESSIONS} online, of {SESSIONS}')")
        # The sessions are counted, and not listed one by one.
        assert f"{SESSIONS - 5} more" in page.text("#tree")
        assert page.evaluate("document.querySelectorAll('*').length") < 2500
        # Only the script of an update: the tests do not wait for the next one of the service.
        times = page.evaluate(UPDATES)
        assert sorted(times)[len(times) // 2] < UPDATE_LIMIT, times
        assert page.complaints == []


#: Show the whole state several times, and return the milliseconds that each took, with its layout.
UPDATES = """
(async () => {
  const times = [];
  for (let turn = 0; turn < 7; turn += 1) {
    const state = await (await fetch("v1/status")).json();
    const began = performance.now();
    showState(state);
    document.body.getBoundingClientRect();
    times.push(performance.now() - began);
  }
  return times;
})()
"""


def _log_in(page: Page, token: str) -> None:
    page.evaluate(
        f"document.querySelector('#token').value = {json.dumps(token)};"
        "document.querySelector('form').requestSubmit()"
    )
