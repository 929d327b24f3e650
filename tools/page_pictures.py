"""Take the pictures of the page that the docs show, of the running demo, in light and dark.

Run `python -m tools.page_pictures` from the root of the checkout; it needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.browser.chromium import browser
from tools import servers

TARGET = Path(__file__).parents[1] / "docs" / "_static"
#: The buttons that were pressed before the pictures are taken.
PRESSED = ("kill-backends", "restart-postgres", "expire-pool", "kill-grpc", "cut-sessions")
SIZE = 1280, 1180
MAX_BYTES = 300_000


@contextmanager
def running_demo() -> Iterator[str]:
    """Run the demo; yield the link to its page."""
    command = [sys.executable, "-m", "moored.cli", "serve", "--demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()
            process.communicate()


def main() -> None:
    """Run the demo, break it, and write the pictures."""
    TARGET.mkdir(exist_ok=True)
    binary = servers.find("chromium")
    assert binary is not None, "Chromium is not installed: make servers"
    with (
        tempfile.TemporaryDirectory() as profile,
        running_demo() as url,
        browser(binary, Path(profile)) as chromium,
        chromium.page() as page,
    ):
        page.resize(*SIZE)
        page.command("Emulation.setScrollbarsHidden", hidden=True)
        page.open(url)
        page.until("document.querySelector('#status').textContent === 'active'")
        for fault in PRESSED:
            row = f'[data-fault="{fault}"]'
            page.evaluate(f"document.querySelector('{row} button').click()")
            page.until(f"document.querySelector('{row} .badge')?.textContent === 'healthy'")
        # Until the numbers over time fill their lines.
        points = "document.querySelector('.line polyline').getAttribute('points').split(' ').length"
        page.until(f"{points} >= 40")
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            path = TARGET / f"page-{scheme}.png"
            page.picture(path)
            assert path.stat().st_size < MAX_BYTES, f"{path} is larger than {MAX_BYTES} bytes"
            print(f"{path.relative_to(TARGET.parents[1])}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
