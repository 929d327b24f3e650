"""The demo in a real browser: every view is whole, and every button is recovered from."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any

import httpx
import pytest
from tests.browser.chromium import Browser, Page
from tests.docs.pages import blocks
from tests.docs.pages import page as manual
from tests.docs.reader import pattern
from tests.frozen import frozen
from tests.service.support import LIMIT, Running, gone, running, until

#: What the map says about each part while it works, and about the servers.
NODES = {
    "server": "PostgreSQL",
    "db": "in use",
    "postgres": "change stream",
    "live": "live events",
    "grpc-server": "gRPC server",
    "grpc": "gRPC channel",
    "chat": "online",
    "search": "consumer",
    "load": "demo traffic",
}
#: The buttons, and the root of the outage that each causes, if it causes one. On a busy machine,
#: callers wait for the connections of an expired pool.
FAULTS = {
    "kill-backends": ("postgres",),
    "restart-postgres": ("server",),
    "black-hole": ("postgres",),
    "expire-pool": (None, "db"),
    "kill-grpc": ("grpc-server",),
    "cut-sessions": ("chat",),
    "take-over": (None,),
}
#: Every view of the page.
VIEWS = ("#", "#drawer", "#span=3600", "#part=db", "#part=server", "#part=postgres", "#words")
SAYS = "document.querySelector('#main .big')?.innerText"
WORKS = f"{SAYS} === 'Everything works.' && document.querySelector('[data-plot=map] svg')"
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
def tab(demo: Running, chromium: Browser) -> Iterator[Page]:
    """The page of the demo, which must not complain."""
    with chromium.page() as page:
        page.open(demo.link)
        page.until(WORKS)
        yield page
        assert page.complaints == []


@pytest.fixture
def shown(tab: Page) -> Page:
    """The page at its overview, whatever the test before has left."""
    tab.evaluate("document.activeElement?.blur(), location.hash = '#'")
    tab.prefer("light")
    tab.resize(1280, 600)
    tab.until(WORKS)
    return tab


def test_the_start_prints_what_the_page_of_the_demo_shows(demo: Running) -> None:
    demo.wait_for("ready after")
    (block,) = blocks(manual("howto/demo"), "console")
    shown = block.partition("\n")[2]
    assert re.search(pattern(shown), "\n".join(demo.lines)), demo.lines


def test_every_part_is_on_the_map_and_alive(shown: Page) -> None:
    for name, text in NODES.items():
        label = f"{_node(name)}?.getAttribute('aria-label')"
        shown.until(f"{label}?.includes(': works') && {label}.includes({json.dumps(text)})")
    # What flows is written on the lines between.
    shown.until(
        "[...document.querySelectorAll('.edges text')]"
        ".filter(each => parseFloat(each.textContent) > 0).length >= 5"
    )
    assert shown.evaluate("document.querySelectorAll('a[data-lane]').length") == len(NODES)
    values = "[...document.querySelectorAll('.chart .value')].map(each => each.innerText)"
    shown.until(f"{values}.length > 4 && {values}.every(each => /\\d/.test(each))")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible_and_fits_any_width(shown: Page, view: str) -> None:
    shown.evaluate(f"location.hash = {view!r}")
    shown.until(f"{WORKS} || document.querySelector('#main pre, #words:not([hidden])')")
    shown.evaluate(AXE.read_text())
    for scheme in ("light", "dark"):
        shown.prefer(scheme)
        for width in (390, 1280):
            shown.resize(width, 844)
            shown.until(f"document.documentElement.scrollWidth <= {width}")
            # In the dark only colours differ; every rule takes seconds.
            rules = "" if scheme == "light" else ", runOnly: ['color-contrast']"
            assert _violations(shown, rules) == [], (view, scheme, width)


def test_every_button_breaks_something_that_recovers(demo: Running, shown: Page) -> None:
    shown.evaluate("location.hash = '#drawer'")
    buttons = "[...document.querySelectorAll('[data-fault]')].map(each => each.dataset.fault)"
    shown.until(f"{buttons}.length > 0")
    assert shown.evaluate(buttons) == list(FAULTS)
    # A session that a user has stopped is not missing.
    session = f"{demo.url}/v1/sessions/chat/account-20"
    assert httpx.delete(
        session, headers=demo.bearer, timeout=LIMIT, trust_env=False, verify=False
    ).is_success
    told = "document.querySelector('.tell')"
    for fault, roots in FAULTS.items():
        button = f"document.querySelector('[data-fault=\"{fault}\"]')"
        last = f"{button}.querySelector('.last').textContent"
        _press(demo, shown, fault)
        _wait_measured(demo, fault)
        # The story is told in the drawer, and ends with the length.
        shown.until(f"{button}.ariaDisabled === 'false' && {last}.startsWith('last: ')")
        shown.until(f"{told}.innerText.startsWith('0 s ')")
        found = _newest(demo, fault)
        assert (found and found["root"]) in roots, (fault, found)
        if found is None:
            continue
        # One length: on the button, in the story, in the list, and from the service. On a busy
        # machine the button was perhaps pressed twice: that of the second outage.
        until(partial(_agrees, demo, shown, fault, last), f"{fault} has one length")
        found = _newest(demo, fault)
        assert found is not None
        length = _took(found["lasted"])
        shown.until(f"{told}.innerText.includes({json.dumps(length)})")
        rows = "[...document.querySelectorAll('.row')].map(each => each.innerText.split('\\n'))"
        shown.until(f"{rows}.some(r => r[0] === '{found['id']}' && r.includes('{length}'))")
        lanes = (
            "[...document.querySelectorAll('.lane')].filter(each => each.querySelector('.outage'))"
        )
        shown.until(f"{lanes}.some(each => each.dataset.lane === '{found['root']}')")


def test_an_outage_opens_by_its_pin_and_has_an_address(demo: Running, shown: Page) -> None:
    break_ = f"{demo.url}/v1/break/kill-grpc"
    assert httpx.post(break_, headers=demo.bearer, timeout=LIMIT, verify=False).status_code == 202
    _wait_measured(demo, "kill-grpc")
    shown.until("document.querySelector('.incident')")
    shown.evaluate("[...document.querySelectorAll('.incident')].at(-1).focus()")
    shown.press("Enter")
    shown.until("document.querySelector('.row[aria-expanded=true]')")
    assert shown.evaluate("document.querySelector('#tip').hidden")
    assert re.fullmatch(r"#at=\d\d%3A\d\d%3A\d\d&outage=\d+", shown.evaluate("location.hash"))
    shown.until("document.querySelector('.story').innerText.includes('work again')")
    shown.evaluate("history.back()")
    shown.until("!document.querySelector('.row[aria-expanded=true]')")


def test_a_frozen_server_is_told_in_five_answers(demo: Running, shown: Page) -> None:
    with frozen(demo.postgres()):
        shown.until(f"{_node('server')}.classList.contains('down')")
        for waiting in ("db", "postgres", "search", "live", "load"):
            shown.until(f"{_node(waiting)}.classList.contains('waits')")
        for bystander in ("grpc", "grpc-server", "chat"):
            assert shown.evaluate(f"{_node(bystander)}.classList.contains('works')"), bystander
        five = shown.text(".five")
        for question in ("Since", "Why", "Who waits", "Cost so far", "What to do"):
            assert question in five
        assert "moored explain server" in five
        spoken = "document.querySelector('#spoken').textContent"
        shown.until(f"{spoken}.includes('moored explain server')")
        # Nothing flows to the server, and what hangs on it waits.
        shown.until("document.querySelector('.edges').textContent.includes('✕')")
    shown.until(f"{SAYS} === 'Everything works.'")


def test_the_routes_of_the_buttons_refuse_other_sites(demo: Running) -> None:
    route = f"{demo.url}/v1/break/expire-pool"

    def press(url: str = route, **headers: str) -> int:
        given = {**demo.bearer, **headers}
        return httpx.post(
            url, headers=given, timeout=LIMIT, trust_env=False, verify=False
        ).status_code

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


def _press(demo: Running, shown: Page, fault: str) -> None:
    """Press a button until the service takes it: the page may learn late of the last recovery."""
    button = f"document.querySelector('[data-fault=\"{fault}\"]')"
    began = time.time()

    def taken() -> bool:
        found = demo.get("/v1/status").json()["faults"]["recoveries"]
        return any(each["fault"] == fault and each["wall"] >= began for each in found)

    def pressed() -> bool:
        shown.until(f"{button}.ariaDisabled === 'false' && {SAYS} === 'Everything works.'")
        shown.evaluate(f"{button}.click()")
        with suppress(AssertionError):
            until(taken, "it is taken", limit=3.0)
        return taken()

    until(pressed, f"{fault} is pressed")


def _wait_measured(demo: Running, fault: str) -> None:
    try:
        until(partial(_measured, demo, fault), f"{fault} is measured")
    except AssertionError as error:
        state = demo.get("/v1/status").json()
        error.add_note(json.dumps({name: state[name] for name in ("answer", "nodes", "faults")}))
        error.add_note("\n".join(demo.lines))
        raise


def _measured(demo: Running, fault: str) -> bool:
    """Whether the recovery from this fault, the last one, has been measured."""
    faults = demo.get("/v1/status").json()["faults"]
    return not faults["running"] and faults["recoveries"][0]["fault"] == fault


def _node(name: str) -> str:
    """Return an expression for the node of a part."""
    return f"document.querySelector('a.node[href=\"#part={name}\"]')"


def _newest(demo: Running, fault: str) -> dict[str, Any] | None:
    """Return the newest outage, if this fault caused it."""
    found: list[dict[str, Any]] = demo.get("/v1/outages").json()["outages"][:1]
    return found[0] if found and found[0]["fault"] == fault else None


def _agrees(demo: Running, shown: Page, fault: str, last: str) -> bool:
    """Whether the button shows the length that the service tells."""
    found = _newest(demo, fault)
    return found is not None and shown.evaluate(last) == f"last: {_took(found['lasted'])}"


def _took(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 0.0995 else f"{seconds * 1000:.0f} ms"
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


def _violations(page: Page, options: str) -> list[str]:
    """Return what axe-core finds."""
    found = page.evaluate(f"axe.run(document, {{resultTypes: ['violations']{options}}})")
    assert "color-contrast" in {each["id"] for each in found["passes"] + found["violations"]}
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found["violations"]]
