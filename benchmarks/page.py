"""What does the live page cost: to open it, to keep it up to date, and for the service?

A real Chromium opens the page of the demo, and of services with 50 and 500 parts and with 2,000
sessions. `core` is the share of a core that the process of the service uses with one open page.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import httpx
import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.browser.chromium import Page, browser  # noqa: E402
from tools import servers  # noqa: E402

from _harness import Figure, Report, main, quartiles, spread  # noqa: E402
from moored.service._history import MAX_SERIES, STEP, History  # noqa: E402

#: The map and the first charts: what a page shows beside its frame.
DRAWN = "document.querySelector('[data-plot=map] svg') && document.querySelector('.chart .line')"
#: Kept while the document is loaded: the milliseconds until map and numbers were drawn.
FIRST = f"""
const drawn = () => {DRAWN};
addEventListener("DOMContentLoaded", () => new MutationObserver((_, observer) => {{
  if (!drawn()) return;
  observer.disconnect();
  requestAnimationFrame(() => (window.firstView = performance.now()));
}}).observe(document.body, {{ childList: true, subtree: true }}))
"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
#: The milliseconds of script that each of some updates takes.
UPDATES = """
(async () => {
  const { render } = await import(new URL("static/page.js", location));
  const times = [];
  for (let turn = 0; turn < 40; turn += 1) {
    await new Promise(requestAnimationFrame);
    const began = performance.now();
    render();
    times.push(performance.now() - began);
  }
  return times.slice(10);
})()
"""


class Service:
    """A running `moored serve`, and the link to its page."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        while len(words := output.read_text().split()) < 2:
            if process.poll() is not None:
                raise SystemExit(output.read_text())
            time.sleep(0.05)
        self.link = words[1]
        self.url, _, self._token = self.link.partition("/?token=")
        self._process = psutil.Process(process.pid)

    @property
    def headers(self) -> dict[str, str]:
        """The header with its token."""
        return {"Authorization": f"Bearer {self._token}"}

    def wait_active(self, online: int) -> None:
        """Wait until all works, with so many sessions."""
        with httpx.Client(headers=self.headers, trust_env=False, timeout=60.0) as http:
            while True:
                state = http.get(f"{self.url}/v1/status").json()
                states = state.get("chat", {}).get("states", {})
                if state["answer"]["state"] == "works" and states.get("online", 0) >= online:
                    return
                time.sleep(0.2)

    def core(self, seconds: float) -> float:
        """Return the share of a core that its process uses, as percents."""
        before, began = self._process.cpu_times(), perf_counter()
        time.sleep(seconds)
        after, passed = self._process.cpu_times(), perf_counter() - began
        used = after.user + after.system - before.user - before.system
        return 100 * used / passed


@contextmanager
def serving(*arguments: str, **environ: object) -> Iterator[Service]:
    """Run a service; `environ` is added to its environment."""
    command = [sys.executable, "-m", "moored.cli", "serve", *arguments, "--port", "0"]
    more = {name: str(value) for name, value in environ.items()}
    with (
        tempfile.NamedTemporaryFile() as output,
        subprocess.Popen(
            command, cwd=HERE, env=os.environ | more, stdout=output, stderr=output
        ) as process,
    ):
        try:
            yield Service(process, Path(output.name))
        finally:
            process.terminate()


def first_views(report: Report, page: Page, service: Service, rounds: int) -> None:
    """Measure how soon a page that is opened shows its frame, and how soon everything."""
    page.command("Page.addScriptToEvaluateOnNewDocument", source=FIRST)
    paints, views = [], []
    for number in range(rounds + 1):
        page.open(service.url if number else service.link)
        page.until("window.firstView")
        if number:  # the first one logs in
            paints.append(page.evaluate(PAINT))
            views.append(page.evaluate("window.firstView"))
    report.add("first_paint_ms", quartiles(paints, "ms"))
    report.add("first_view_ms", quartiles(views, "ms"))


def bytes_per_second(service: Service, seconds: float) -> float:
    """Return what the stream of one page sends, after the state that it begins with."""
    url, size, began = f"{service.url}/v1/events", 0, 0.0
    with httpx.stream("GET", url, headers=service.headers, trust_env=False, timeout=60.0) as answer:
        for chunk in answer.iter_raw():
            if not began:
                if b"event: tick" in chunk:
                    began = perf_counter()
                continue
            size += len(chunk)
            if (passed := perf_counter() - began) >= seconds:
                return size / passed
    raise AssertionError("the stream has ended")


def history_share() -> Figure:
    """Return the share of a core that writing the most series every two seconds takes."""
    history, names = History(0.0), [f"part-{number}.value" for number in range(MAX_SERIES)]
    took = []
    for tick in range(1, 1000):
        values = {name: float(tick) for name in names}
        began = perf_counter()
        history.write(tick * STEP, values)
        took.append(perf_counter() - began)
    if len(history.rows(900).values) != MAX_SERIES:
        raise AssertionError("series are missing")
    return Figure(100 * statistics.mean(took) / STEP, "%")


def costs(
    report: Report, page: Page, name: str, seconds: float, *, parts: int = 0, sessions: int = 0
) -> None:
    """Measure an open page of a service with so many parts or sessions."""
    with serving("_page_side:app", PARTS=parts, SESSIONS=sessions) as service:
        service.wait_active(sessions)
        time.sleep(3.0)
        alone = service.core(seconds)
        page.open(service.link)
        page.until(DRAWN)
        nodes = page.evaluate("document.querySelectorAll('.node').length")
        lanes = page.evaluate("document.querySelectorAll('.lane').length")
        if not 1 <= nodes <= 48 or lanes > 48:
            raise AssertionError(f"the page draws {nodes} nodes and {lanes} lanes")
        report.add(f"core_{name}", Figure(service.core(seconds), "%"))
        report.add(f"core_{name}_without_page", Figure(alone, "%"))
        report.add(f"patch_ms_{name}", quartiles(page.evaluate(UPDATES), "ms"))
        page.open("about:blank")


def measure(report: Report, quick: bool) -> None:
    """Open the page of the demo, and of large services."""
    binary = servers.find("chromium")
    if binary is None:
        raise SystemExit("Chromium is not installed: run make servers")
    seconds = 6.0 if quick else 30.0
    report.add("history_core", history_share())
    with (
        tempfile.TemporaryDirectory() as profile,
        browser(binary, Path(profile)) as chromium,
        chromium.page() as page,
    ):
        page.resize(1280, 900)
        with serving("--demo") as demo:
            demo.wait_active(1)
            time.sleep(seconds)
            first_views(report, page, demo, 5 if quick else 25)
            report.add("patch_ms", quartiles(page.evaluate(UPDATES), "ms"))
            page.open("about:blank")
            report.add("bytes_per_s", spread([bytes_per_second(demo, seconds)], "B/s"))
        costs(report, page, "50_parts", seconds, parts=50)
        costs(report, page, "500_parts", seconds, parts=500)
        costs(report, page, "2000_sessions", seconds, sessions=2000)


if __name__ == "__main__":
    main("page", __doc__ or "", measure)
