"""Take the pictures of the page that the docs show, of the running demo, in light and dark.

Run `python -m tools.page_pictures` from the root of the checkout; it needs Chromium. With `--all`
it writes each view at each width to `build/pictures` instead, also as the eyes of a deuteranope
see it, to be looked at.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from tests.browser.chromium import Page, browser
from tools import servers

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "_static"
ALL = ROOT / "build" / "pictures"
#: The buttons that are pressed before the pictures are taken.
PRESSED = ("kill-backends", "restart-postgres", "kill-grpc", "cut-sessions")
#: The picture of the docs: sentence, map and timeline during an outage.
SIZE = 1280, 900
WIDTHS = 390, 768, 1280, 2560
SCHEMES = "light", "dark"
#: The views, by name, with the fragments of their addresses.
VIEWS = {
    "overview": "#",
    "hour": "#span=3600",
    "part": "#part=db",
    "server": "#part=server",
    "stream": "#part=postgres",
    "drawer": "#drawer",
    "words": "#words",
}
#: Those that are also taken while the server does not answer.
OUTAGE = "overview", "part", "server"
MAX_BYTES = 300_000
#: Seconds of load before the first fault, so that the charts show something.
WARM_UP = 60.0
SHOWN = "document.querySelector('#main .plot')"
WORKS = "document.title.startsWith('●')"


@contextmanager
def running_demo() -> Iterator[tuple[str, psutil.Process]]:
    """Run the demo; yield the link to its page, and its process."""
    command = [sys.executable, "-m", "moored.cli", "serve", "--demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def frozen_server(demo: psutil.Process) -> Iterator[None]:
    """Stop PostgreSQL with SIGSTOP: it keeps its connections, and answers nothing."""
    family = [each for each in demo.children(recursive=True) if "postgres" in each.name()]
    for each in family:
        each.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)


def press(page: Page, url: str, fault: str) -> None:
    """Press a button of the demo, and wait until it has recovered."""
    page.open(f"{url}#drawer")
    button = f"document.querySelector('[data-fault=\"{fault}\"]')"
    page.until(f"{button}?.getAttribute('aria-disabled') === 'false' && {WORKS}")
    page.evaluate(f"{button}.click()")
    page.until(f"{button}.querySelector('.last').textContent.startsWith('last') && {WORKS}")


def whole(page: Page, path: Path) -> None:
    """Write a picture of the whole page, not only of the window."""
    height = page.evaluate("document.documentElement.scrollHeight")
    page.resize(page.evaluate("innerWidth"), min(height, 4000))
    time.sleep(0.3)
    path.write_bytes(b64decode(page.command("Page.captureScreenshot")["data"]))
    print(path.relative_to(ROOT), f"{path.stat().st_size} bytes", flush=True)


def views(page: Page, names: tuple[str, ...], kind: str) -> None:
    """Take each of these views at each width, in both schemes."""
    for name in names:
        page.evaluate(f"location.hash = {VIEWS[name]!r}")
        for width in WIDTHS:
            for scheme in SCHEMES:
                page.resize(width, 844)
                page.prefer(scheme)
                time.sleep(0.7)
                whole(page, ALL / f"{kind}-{name}-{width}-{scheme}.png")


def take_all(page: Page, demo: psutil.Process) -> None:
    """Take every view, while all is well and during an outage."""
    ALL.mkdir(parents=True, exist_ok=True)
    views(page, tuple(VIEWS), "good")
    with frozen_server(demo):
        page.until("document.title.startsWith('✖')")
        views(page, OUTAGE, "outage")
        page.evaluate("location.hash = '#'")
        page.resize(1280, 844)
        page.command("Emulation.setEmulatedVisionDeficiency", type="deuteranopia")
        for scheme in SCHEMES:
            page.prefer(scheme)
            time.sleep(0.7)
            whole(page, ALL / f"deuteranopia-{scheme}.png")


def take_those_of_the_docs(page: Page, demo: psutil.Process) -> None:
    """Take the map and the timeline during an outage."""
    TARGET.mkdir(exist_ok=True)
    page.evaluate("location.hash = '#'")
    page.resize(*SIZE)
    with frozen_server(demo):
        page.until("document.title.startsWith('✖')")
        time.sleep(8.0)  # until callers wait, too
        for scheme in SCHEMES:
            page.prefer(scheme)
            path = TARGET / f"page-{scheme}.png"
            page.picture(path)
            assert path.stat().st_size < MAX_BYTES, f"{path} is larger than {MAX_BYTES} bytes"
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def main() -> None:
    """Run the demo, break it, and write the pictures."""
    binary = servers.find("chromium")
    assert binary is not None, "Chromium is not installed: make servers"
    with (
        tempfile.TemporaryDirectory() as profile,
        running_demo() as (url, demo),
        browser(binary, Path(profile)) as chromium,
        chromium.page() as page,
    ):
        page.resize(*SIZE)
        page.command("Emulation.setScrollbarsHidden", hidden=True)
        page.open(url)
        page.until(f"{SHOWN} && {WORKS}")
        address = page.evaluate("location.origin + location.pathname")
        time.sleep(WARM_UP)
        for fault in PRESSED:
            press(page, address, fault)
            time.sleep(WARM_UP / 4)
        (take_all if "--all" in sys.argv else take_those_of_the_docs)(page, demo)


if __name__ == "__main__":
    main()
