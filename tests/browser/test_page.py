"""The live page, in a real browser, over a real service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Browser, Page
from tests.browser.many_sessions import SESSIONS
from tests.browser.marked_up import MARKUP
from tests.service.support import Running, running

from moored.embedded import SyncEmbeddedPostgres
from moored.testing import scaled

ROOT = Path(__file__).parents[2]
SAYS = "document.querySelector('#main .big')?.innerText ?? ''"
WORKS = f"({SAYS}) === 'Everything works.' && document.querySelector('[data-plot=map] svg')"
#: Milliseconds of script for one update, many times as long as it may take: the machine is busy.
UPDATE_LIMIT = 300
#: Kept while the document is loaded: the line of the first chart, when it is first drawn.
FIRST_LINE = """
addEventListener("DOMContentLoaded", () => new MutationObserver((_, observer) => {
  const line = document.querySelector(".chart .line")?.getAttribute("d");
  if (line === undefined) return;
  window.firstLine ??= line;
  observer.disconnect();
}).observe(document.body, { childList: true, subtree: true }))
"""


@pytest.fixture(scope="module")
def service(postgres: SyncEmbeddedPostgres) -> Iterator[Running]:
    with running("--database-url", postgres.url) as started:
        started.wait_active()
        yield started


@pytest.fixture(scope="module")
def shown(service: Running, chromium: Browser) -> Iterator[Page]:
    """The page of the service, which must not complain."""
    with chromium.page() as page:
        page.resize(1280, 600)
        page.open(service.link)
        page.until(WORKS)
        yield page
        assert page.complaints == []


@pytest.fixture
def home(shown: Page) -> Page:
    """The page at its overview."""
    shown.evaluate("location.hash = '#'")
    shown.until(WORKS)
    return shown


def test_the_page_shows_sentence_map_lanes_and_numbers(home: Page) -> None:
    assert home.text("#name") == "moored"
    assert "all well for " in home.text("#main .sentence")
    names = "[...document.querySelectorAll('.node')].map(each => each.getAttribute('aria-label'))"
    labels = home.evaluate(names)
    assert any(label.startswith("postgres, change stream: works") for label in labels), labels
    assert any(label.startswith("127.0.0.1:") for label in labels), labels
    lanes = home.evaluate(
        "[...document.querySelectorAll('a[data-lane]')].map(each => each.dataset.lane)"
    )
    # The server first, then what hangs on it.
    assert lanes[0].startswith("127.0.0.1:")
    assert "postgres" in lanes
    home.until("document.querySelectorAll('.chart').length > 0")  # from the second tick on
    assert home.evaluate("document.title").startswith("● moored")


def test_a_link_on_a_page_of_another_site_opens_the_page(service: Running, page: Page) -> None:
    """Such as a terminal or a chat in the browser: on the way, a session is kept back."""
    for link in (service.link, service.url):
        page.open(f"data:text/html,<a href='{link}'>open</a>")
        page.until("document.querySelector('a')")
        page.evaluate("document.querySelector('a').click()")
        page.until(WORKS)
        assert page.evaluate("location.search") == ""


def test_a_part_has_a_page_and_back_returns(home: Page) -> None:
    home.evaluate("document.querySelector('a.node[href=\"#part=postgres\"]').focus()")
    home.press("Enter")
    home.until(f"({SAYS}) === 'postgres works'")
    home.until("document.querySelector('#main pre')")
    assert home.evaluate("location.hash") == "#part=postgres"
    for title in ("Timeline", "Numbers", "Now", "Explanation", "moored explain postgres"):
        home.until(f"document.querySelector('#main').innerText.includes('{title}')")
    home.evaluate("history.back()")
    home.until(WORKS)


def test_a_part_that_does_not_exist_is_said_to_be_missing(service: Running, page: Page) -> None:
    page.open(f"{service.link}#part=nothing")
    page.until(f"({SAYS}).includes('no such part')")


def test_the_keyboard_alone_reaches_everything_and_keeps_the_focus(home: Page) -> None:
    home.until("document.querySelector('.chart a')")  # from the second tick on
    home.evaluate("document.body.focus(), document.activeElement.blur()")
    seen = set()
    for _ in range(60):
        home.press("Tab")
        where = (
            "document.activeElement.closest('#theme, .node, .spans, [data-lane], .chart, footer')"
        )
        seen.add(
            home.evaluate(
                f"{where}?.id || {where}?.getAttribute('class')?.split(' ')[0] || {where}?.tagName"
            )
        )
    assert {"theme", "node", "spans", "a", "chart", "FOOTER"} <= seen, seen
    # Arrows go on within the lanes, and an update keeps the focus.
    home.evaluate("document.querySelector('a[data-lane]').focus()")
    first = home.evaluate("document.activeElement.dataset.lane")
    home.press("ArrowDown")
    second = home.evaluate("document.activeElement.dataset.lane")
    assert first != second
    line = "document.querySelector('.chart .line').getAttribute('d')"
    home.evaluate(f"window.before = {line}")
    home.until(f"{line} !== window.before")
    assert home.evaluate("document.activeElement.dataset.lane") == second
    home.press("Enter")
    home.until(f"({SAYS}).startsWith({json.dumps(second)})")
    home.press("Escape")
    home.until(WORKS)


def test_the_theme_is_kept(home: Page) -> None:
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    for expected in ("light", "dark"):
        home.evaluate("document.querySelector('#theme').click()")
        assert home.evaluate(scheme) == expected
    home.command("Page.reload")
    home.until(f"{WORKS} && {scheme} === 'dark'")
    home.evaluate("document.querySelector('#theme').click()")
    assert home.evaluate(scheme) == "light dark"


def test_a_narrow_window_does_not_scroll_sideways(home: Page) -> None:
    home.resize(360, 800)
    home.until("document.querySelector('.plot').clientWidth < 360")
    assert home.evaluate("document.documentElement.scrollWidth") <= 360
    home.resize(1280, 600)


def test_the_first_paint_shows_what_was_before_the_page_was_opened(
    service: Running, page: Page
) -> None:
    began = service.get("/v1/history?span=120").json()
    old = float(scaled(600, least=8))
    while began["now"] - began["began"] < old:
        time.sleep(0.5)
        began = service.get("/v1/history?span=120").json()
    page.command("Page.addScriptToEvaluateOnNewDocument", source=FIRST_LINE)
    page.resize(1280, 1200)
    page.open(service.link)
    page.until("window.firstLine")
    points = page.evaluate("window.firstLine").replace("M", " ").replace("L", " ").split()[::2]
    assert len(points) >= old / 2 - 1, points


def test_without_scripts_the_page_is_the_text_of_the_status(service: Running) -> None:
    text = service.get("").text
    assert "<noscript>" in text
    assert "Everything works" in text.partition("<noscript>")[2].partition("</noscript>")[0]


def test_names_and_reasons_are_text_and_never_markup(page: Page) -> None:
    with running("tests.browser.marked_up:app", cwd=ROOT) as service:
        page.resize(1280, 1000)
        page.open(service.link)
        page.until(f"document.querySelector('#main').innerText.includes({json.dumps(MARKUP)})")
        page.evaluate(f"location.hash = '#part=' + encodeURIComponent({json.dumps(MARKUP)})")
        page.until(f"({SAYS}).startsWith({json.dumps(MARKUP)}) && document.querySelector('pre')")
        page.until(f"document.querySelector('#main').innerText.includes('because of {MARKUP}')")
        # Tooltips too.
        page.evaluate("document.querySelector('a[data-lane]').focus()")
        page.press("ArrowDown")
        page.until("!document.querySelector('#tip').hidden")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("window.hacked") is None
        text = service.get("").text
        assert MARKUP not in text
        assert page.complaints == []


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
        page.until(WORKS)
        assert page.evaluate("document.cookie") == ""  # not for scripts
        assert first.stop() == 0
    page.until(f"({SAYS}).startsWith('No contact with the service for ')")
    assert page.evaluate("document.title").startswith("? moored")
    # The clocks stand still: what is shown is old.
    up = page.text("#meta")
    page.until(f"parseInt(({SAYS}).match(/(\\d+) s\\.$/)[1]) >= 3")
    assert page.text("#meta") == up
    with running("--port", url.rpartition(":")[2], environ=environ) as second:
        # The cookie is valid at the new process as well.
        second.wait_active()
        page.until(WORKS)
        page.evaluate("document.querySelector('form[action=\"logout\"] button').click()")
        page.until("document.querySelector('#token')")


def test_the_page_is_quick_with_many_sessions(page: Page) -> None:
    with running("tests.browser.many_sessions:app", cwd=ROOT) as service:
        service.wait_for("all sessions are online")
        # The first sign-in of all sessions is no incident.
        assert service.get("/v1/status").json()["outages"] == []
        page.open(service.link)
        # The sessions are counted, and not listed one by one.
        label = "document.querySelector('a.node[href=\"#part=chat\"]')?.getAttribute('aria-label')"
        page.until(f"{label}?.includes('{SESSIONS:,} of {SESSIONS:,} online')")
        assert page.evaluate("document.querySelectorAll('*').length") < 2500
        # Only the script of an update: the tests do not wait for the next one of the service.
        times = page.evaluate(UPDATES)
        assert sorted(times)[len(times) // 2] < UPDATE_LIMIT, times
        assert page.complaints == []


#: Draw the whole page several times, and return the milliseconds that each took.
UPDATES = """
(async () => {
  const { render } = await import(new URL("static/page.js", location));
  const times = [];
  for (let turn = 0; turn < 7; turn += 1) {
    const began = performance.now();
    render();
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
