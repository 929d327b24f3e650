"""The demo in a real browser: every panel is alive, and every button is recovered from.

Pictures of the page are written to `build/pictures`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from tests.browser.chromium import Browser, Page
from tests.docs.pages import blocks
from tests.docs.pages import page as manual
from tests.docs.reader import pattern
from tests.service.support import LIMIT, Running, gone, running

#: The parts that the page shows, and a text that only moves while the part works.
PARTS = {
    "server": "PostgreSQL",
    "db": "in use",
    "postgres": "streaming",
    "live": "2 streams",
    "grpc-server": "pid",
    "grpc": "connected to",
    "chat": "online, of",
    "search": "acknowledged",
    "load": "changes",
}
#: The buttons, and a part of what the page says about how the fault was noticed.
FAULTS = {
    "kill-backends": "terminat|discarded",
    "restart-postgres": "server|connection",
    "black-hole": "listener|silent|did not arrive|no answer|not answered",
    "expire-pool": "the pool has discarded",
    "kill-grpc": "SIGKILL|connect",
    "cut-sessions": r"1\d sessions not online",
    "take-over": "1 session not online",
}
PICTURES = Path(__file__).parents[2] / "build" / "pictures"
AXE = files("axe_core_python").joinpath("axe.min.js")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running demo, which must leave no process and no file."""
    scratch = tmp_path_factory.mktemp("demo")
    with running("--demo", environ={"TMPDIR": str(scratch)}) as started:
        started.wait_active()
        family = started.family()
        yield started
        assert started.stop() == 0, started.lines
    gone(family)
    assert list(scratch.glob("moored-demo-*")) == []


@pytest.fixture(scope="module")
def shown(demo: Running, chromium: Browser) -> Iterator[Page]:
    """The page of the demo, which must not complain."""
    with chromium.page() as page:
        page.open(demo.link)
        page.until("document.querySelector('#status')?.textContent === 'active'")
        yield page
        assert page.complaints == []


@pytest.fixture(scope="module")
def pictures() -> Path:
    """The directory for pictures of the page, which are kept."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES


def test_the_start_prints_what_the_page_of_the_demo_shows(demo: Running) -> None:
    demo.wait_for("ready after")
    (block,) = blocks(manual("howto/demo"), "console")
    shown = block.partition("\n")[2]
    assert re.search(pattern(shown), "\n".join(demo.lines)), demo.lines


def test_every_panel_is_alive_at_any_width_and_accessible(shown: Page, pictures: Path) -> None:
    for part, text in PARTS.items():
        card = f"document.querySelector('[data-part=\"{part}\"]').innerText"
        page_shows = f"{card}.includes('active') && {card}.includes({json.dumps(text)})"
        shown.until(page_shows)
    moving = "[...document.querySelectorAll('[data-part=load] .line .detail')]"
    shown.until(f"{moving}.length === 6 && {moving}.every(rate => parseFloat(rate.innerText) > 0)")
    sentence = "document.querySelector('#sentence').innerText"
    shown.until(f"{sentence}.startsWith('Everything works: 11 parts, for ')")
    assert ", for 0 s" not in shown.text("#sentence")
    # The other panels: the tree, the state machines and the events.
    assert "demo" in shown.text("#tree")
    assert shown.evaluate("document.querySelectorAll('[data-part=postgres] .step.lit').length") == 2
    assert shown.evaluate("document.querySelectorAll('#events tr').length") > 0
    for fact in ("retained WAL", "lag", "canary", "outbox", "7 of 7 met"):
        shown.until(f"document.querySelector('[data-part=postgres]').innerText.includes('{fact}')")
    # An update keeps the focus, and a part says why it is in its state.
    shown.evaluate("document.querySelector('[data-why=db]').focus()")
    age = "document.querySelector('[data-part=db] .time').dataset.began"
    shown.until(f"(window.before ??= {age}) !== {age}")
    assert shown.evaluate("document.activeElement.dataset.why") == "db"
    shown.evaluate("document.activeElement.click()")
    shown.until("document.querySelector('#why-text').innerText.includes('ready')")
    shown.evaluate("document.querySelector('#why-close').click()")
    shown.evaluate(AXE.read_text())
    for scheme in ("light", "dark"):
        shown.prefer(scheme)
        for width in (400, 1600):
            shown.resize(width)
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            buttons = "[...document.querySelectorAll('button.break')]"
            box = "button.getBoundingClientRect()"
            reach = f"{buttons}.every(button => {box}.left >= 0 && {box}.right <= {width})"
            assert shown.evaluate(reach), width
            shown.picture(pictures / f"page-{scheme}-{width}.png")
        # In the dark only colours differ; every rule takes seconds.
        rules = "" if scheme == "light" else ", runOnly: ['color-contrast']"
        assert _violations(shown, rules) == [], scheme


def test_every_button_breaks_something_that_recovers(
    demo: Running, shown: Page, pictures: Path
) -> None:
    shown.resize(1280, 300)
    buttons = "[...document.querySelectorAll('[data-fault]')].map(row => row.dataset.fault)"
    assert shown.evaluate(buttons) == list(FAULTS)
    # A session that a user has stopped is not missing.
    session = f"{demo.url}/v1/sessions/chat/account-20"
    assert httpx.delete(session, headers=demo.bearer, trust_env=False).is_success
    # Every status is recorded as it is shown, so that a short one is not missed.
    status = "document.querySelector('#status')"
    shown.evaluate(
        f"window.seen = []; new MutationObserver(() => seen.push({status}.textContent))"
        f".observe({status}, {{childList: true}})"
    )
    for fault, noticed in FAULTS.items():
        row = f'[data-fault="{fault}"]'
        before = f"document.querySelector('{row} .recovery')?.innerText"
        shown.evaluate(f"window.before = {before}")
        button = f"document.querySelector('{row} button')"
        shown.until(f"{button}.ariaDisabled === 'false'")  # no other recovery is measured
        shown.evaluate(f"{button}.click()")
        badge = f"document.querySelector('{row} .badge')?.textContent"
        ended = f"({badge} === 'healthy' || {badge} === 'failed')"
        shown.until(f"{ended} && {before} !== window.before")
        text = shown.text(f"{row} .recovery")
        healthy = re.search(r"after (\d+\.\d\d) s\n[\s\S]*noticed after (\d+\.\d\d) s: (.*)", text)
        assert healthy is not None, (fault, text)
        assert float(healthy[1]) >= float(healthy[2]), text
        assert re.search(noticed, healthy[3]), text
        assert "cost: " in text
        # The times are those of the service, not of the page.
        now = demo.get("/v1/status").json()
        measured = next(r for r in now["faults"]["recoveries"] if r["fault"] == fault)
        assert healthy[1] == f"{measured['healthy_after']:.2f}"
        assert f"after {healthy[1]} s" in shown.text("#faults-status")
        if fault == "black-hole":
            causes = "\n".join(now["outages"][0]["because"])
            assert "silent for" in causes
            assert "reset" not in causes
    assert {"starting", "waiting", "degraded", "active"} >= set(shown.evaluate("seen")) > {"active"}
    server = shown.text('[data-path="demo/grpc-server/run"]')
    assert "restarted" in server
    assert "SIGKILL" in server
    # Steps are shown as descriptions, not by their names in the code.
    for section in ("#sentence", "#parts", "#outages", "#events"):
        text = shown.text(section)
        assert "start_" not in text, section
        assert "['" not in text, section
    incidents = shown.text("#outages")
    assert "recovered" in incidents
    # The cause of the outage of all parts is the end of the server, whichever noticed it first.
    assert "because demo/server/run: the server ended by itself" in incidents
    shown.resize(1280, 1180)
    for scheme in ("light", "dark"):  # the pictures of the documentation
        shown.prefer(scheme)
        shown.picture(pictures / f"after-faults-{scheme}.png")


def test_the_routes_of_the_buttons_refuse_other_sites(demo: Running) -> None:
    route = f"{demo.url}/v1/break/expire-pool"

    def press(url: str = route, **headers: str) -> int:
        given = {**demo.bearer, **headers}
        return httpx.post(url, headers=given, timeout=LIMIT, trust_env=False).status_code

    assert press(Authorization="none") == 401
    assert press(origin=demo.url.replace("http", "https")) == 403
    assert press(origin="http://127.0.0.1:1") == 403
    assert press(origin="https://elsewhere.example") == 403
    assert press(origin="null") == 403
    assert press(host="elsewhere.example") == 421
    assert press(f"{demo.url}/v1/break/nothing") == 404
    assert demo.get("/v1/break/expire-pool").status_code == 405
    deadline = time.monotonic() + LIMIT
    while press(origin=demo.url) != 202:  # the recovery from another button may be measured now
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while demo.get("/v1/status").json()["faults"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _violations(page: Page, options: str) -> list[str]:
    """Return what axe-core judges to be serious or critical."""
    # Without most of the rows that are all alike.
    context = "{exclude: [['#events tr:nth-child(n+4)'], ['#tree ul ul']]}"
    found = page.evaluate(f"axe.run({context}, {{resultTypes: ['violations']{options}}})")
    assert "color-contrast" in {each["id"] for each in found["passes"] + found["violations"]}
    return [
        f"{each['id']}: {each['nodes'][0]['html']}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
