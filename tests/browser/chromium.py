"""A real Chromium, driven by its own protocol over a websocket."""

from __future__ import annotations

import json
import re
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

__all__ = ["Browser", "Page", "browser"]

#: Three times what the page may take to show a change on a busy machine.
LIMIT = 60.0
#: The codes of keys, as browsers number them.
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
OPTIONS = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
    "--remote-debugging-port=0",
)


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self._socket = socket
        self._session = session
        self._number = 0
        #: What the page complained about: exceptions, and console errors.
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")
        self.resize(1280, 300)  # small, because every update of the page is painted

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the browser, and return its response."""
        answer = self._exchange(method, **parameters)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _exchange(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {
            "id": self._number,
            "method": method,
            "params": parameters,
            "sessionId": self._session,
        }
        self._socket.send(json.dumps(command))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT))
            if message.get("sessionId") != self._session:
                continue
            if message.get("id") == self._number:
                return dict(message)
            self._note(message)

    def end(self, method: str) -> None:
        """Close the tab (`Page.close`), or crash its process (`Page.crash`)."""
        self._number += 1
        command = {"id": self._number, "method": method, "sessionId": self._session}
        self._socket.send(json.dumps(command))

    def open(self, url: str) -> None:
        """Open a URL."""
        answer = self.command("Page.navigate", url=url)
        assert not answer.get("errorText"), answer

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element; empty if it does not exist."""
        found = self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found)

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + LIMIT
        while not self._holds(expression):
            assert time.monotonic() < deadline, f"never: {expression}; the page:\n{self.text()}"
            time.sleep(0.2)

    def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def press(self, key: str) -> None:
        """Press a key, such as "Tab" or "ArrowDown"."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.command("Input.dispatchKeyEvent", type="rawKeyDown", **about)
        if key == "Enter":
            self.command("Input.dispatchKeyEvent", type="char", text="\r", **about)
        self.command("Input.dispatchKeyEvent", type="keyUp", **about)

    def prefer(self, scheme: str) -> None:
        """Set the preferred colours: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Write a picture of the window, from the top of the page on, as PNG."""
        self.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
        path.write_bytes(b64decode(self.command("Page.captureScreenshot")["data"]))

    def _holds(self, expression: str) -> bool:
        # During a navigation there may be no element, or no page.
        guarded = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        answer = self._exchange("Runtime.evaluate", expression=guarded, returnByValue=True)
        return bool(answer.get("result", {}).get("result", {}).get("value"))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(str(parameters["entry"]))


class Browser:
    """A running Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 1_000_000

    @contextmanager
    def page(self) -> Iterator[Page]:
        """Open a new tab with its own cookies and storage."""
        with self.tabs() as open_tab:
            yield open_tab()

    @contextmanager
    def tabs(self) -> Iterator[Callable[[], Page]]:
        """Yield a function that opens a new tab; the tabs share their cookies and storage."""
        context = self._command("Target.createBrowserContext")["browserContextId"]

        def open_tab() -> Page:
            blank = {"url": "about:blank", "browserContextId": context}
            target = self._command("Target.createTarget", **blank)["targetId"]
            session = self._command("Target.attachToTarget", targetId=target, flatten=True)
            return Page(self._socket, session["sessionId"])

        yield open_tab
        self._command("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """Close the browser, which is quicker than a signal."""
        self._command("Browser.close")

    def _command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])


@contextmanager
def browser(binary: str, profile: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile; it is ended with the block."""
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(
            [binary, *OPTIONS, f"--user-data-dir={profile}"], stdout=log, stderr=log
        )
    try:
        # No pings: their thread would draw from the shared random while other tests rely on it.
        address = _address(process, profile / "log")
        with connect(address, max_size=None, proxy=None, ping_interval=None) as socket:
            started = Browser(socket)
            yield started
            started.close()
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait(LIMIT)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + LIMIT
    while not (found := re.search(r"DevTools listening on (ws://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found[1]
